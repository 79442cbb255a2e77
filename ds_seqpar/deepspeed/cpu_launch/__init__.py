"""DeepSpeed's compiled op and its shared memory, on ranks of one CPU host."""
