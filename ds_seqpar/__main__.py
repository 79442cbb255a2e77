"""Entry point for `python -m ds_seqpar`; see `ds_seqpar.cli`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
