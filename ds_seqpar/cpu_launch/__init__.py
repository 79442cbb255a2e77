"""DeepSpeed's compiled op and shared memory, on ranks of one CPU host."""
