"""Generation with the ranks of a sequence."""
