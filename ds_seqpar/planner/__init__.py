"""Choice of "auto" settings, and cost estimates. The package is imported only for "auto" settings or by a command."""
