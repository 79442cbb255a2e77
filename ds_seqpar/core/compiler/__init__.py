"""The compiler, which decides in advance which tokens each rank holds and what each rank computes in each step.

The compiler works only with integers, not with tensors.
"""
