"""Support for DeepSpeed's compiled op and the op's shared memory on a single CPU host."""
