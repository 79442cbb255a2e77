"""What runs a plan: kernels, transfers, process groups and the ops around them."""
