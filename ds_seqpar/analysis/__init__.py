"""Checks, drawings and listings of plans and programs. The engine itself does not import this package."""
