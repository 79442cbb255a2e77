"""The compiler: decides, before anything runs, which rank holds which tokens and what each rank computes when.

The compiler works only with integers, not with tensors.
"""
