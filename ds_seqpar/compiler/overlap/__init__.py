"""The overlap pass, which reorders plans, and the simulator that compares them."""
