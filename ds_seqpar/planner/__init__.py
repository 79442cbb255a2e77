"""What is chosen where settings are "auto", and what a step would cost: loaded by that or by a command only."""
