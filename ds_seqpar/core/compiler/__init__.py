"""The compiler, which decides in advance which rank holds which tokens and what each rank computes in each step.

The compiler works only with integers, not with tensors.
"""
