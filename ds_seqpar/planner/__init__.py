"""The choice of "auto" settings and the cost of a step. Loaded only for such settings or by a command."""
