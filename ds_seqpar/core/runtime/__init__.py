"""The runtime of a program: kernels, transfers, process groups and custom ops."""
