"""The section as a dataclass, and the DeepSpeed JSON around it."""
