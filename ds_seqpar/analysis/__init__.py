"""Checks, pictures and listings of plans and programs. The engine imports none of it."""
