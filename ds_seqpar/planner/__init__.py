"""Choice of "auto" settings and cost estimates, imported only for "auto" settings or by a command."""
