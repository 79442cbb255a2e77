"""Decisions made before anything runs: which rank holds which tokens, and what is computed where and when. Integers
only.
"""
