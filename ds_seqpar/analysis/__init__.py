"""Checks, pictures and listings of plans and programs, which the engine itself does not import."""
