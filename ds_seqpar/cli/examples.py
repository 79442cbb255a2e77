"""Copy the examples and their DeepSpeed JSONs into a folder."""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError

FOLDERS = ("examples", "ds_configs")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("examples", help="copy the examples and the DeepSpeed JSONs that they start with")
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet, or is empty")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.folder.exists() and any(args.folder.iterdir()):
        raise ConfigError(f"examples needs a folder that does not exist yet, or is empty; got {args.folder}")
    source = _source()
    for name in FOLDERS:
        shutil.copytree(source / name, args.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    print(f"copied to {args.folder}; begin with python {args.folder / 'examples' / 'demo.py'}")


def _source() -> Path:
    """Return the folder that contains the examples, either in a clone or as installed from a wheel."""
    clone = Path(__file__).resolve().parents[2]
    if (clone / "examples" / "demo.py").is_file():
        return clone
    for file in importlib.metadata.files("ds_seqpar") or ():
        if file.parts[-2:] == ("examples", "demo.py"):
            return Path(file.locate()).resolve().parents[1]
    raise ConfigError(
        "examples needs the files that ds_seqpar is installed with; got none, install its wheel or clone it"
    )
