"""Checks, pictures and listings of plans and programs. The engine does not import it."""
