"""Choice of "auto" settings and cost estimates of a step, loaded only for such settings or by a command."""
