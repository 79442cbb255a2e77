"""The program of a rank: its steps as instructions over slots, including the Ulysses head exchanges."""
