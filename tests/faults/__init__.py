"""Runs that are broken off, damaged, or out of room. The long version: python -m tests.faults"""
