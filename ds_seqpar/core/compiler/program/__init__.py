"""The program of a rank: instructions over slots for the rank's steps, including the Ulysses head exchanges."""
