"""Folders for other programs: drafter, acceptance head, policy, model card, custom_generate."""
