"""The runtime of a program: kernels, transfers, process groups and the ops around them."""
