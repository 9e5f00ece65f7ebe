"""Exported folders: drafter, acceptance head, policy, model card and custom_generate."""
