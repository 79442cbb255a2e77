"""The program of a rank: its steps as instructions over slots, with Ulysses' exchanges of heads."""
