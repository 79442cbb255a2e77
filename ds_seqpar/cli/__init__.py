"""The commands of `python -m ds_seqpar`."""
