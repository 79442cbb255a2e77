"""A rank's steps as instructions over slots, with Ulysses' exchanges."""
