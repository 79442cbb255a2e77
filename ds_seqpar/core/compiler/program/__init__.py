"""A rank's program: its steps as instructions on buffers (slots), including the Ulysses head exchanges."""
