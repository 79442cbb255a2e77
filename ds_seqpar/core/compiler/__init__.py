"""What is decided before anything runs: who holds which tokens, what is computed where when. Integers only."""
