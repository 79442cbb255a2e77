"""The process of `on_stand_in`: finds the stand-in, or compiles it, and goes on in `ranks`."""

import ctypes
import hashlib
import importlib
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def library():
    """The stand-in, compiled once for a version of torch."""
    torch = Path(find_spec("torch").origin).parent
    name = hashlib.sha256(f"{version('torch')} {torch} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(sys.prefix, "torch_extensions"), "stand_in")
    if not (made := folder / f"{name}.so").exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{name}.{os.getpid()}"
        words = [os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(part)]
        words += [f"-I{torch / 'include'}", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'},--no-as-needed"]
        subprocess.run([*words, "-lc10", "-ltorch_cpu"], check=True)
        part.replace(made)
    return ctypes.CDLL(str(made))


if __name__ == "__main__":
    device = library()  # before torch is imported
    importlib.import_module("tests.stand_in.ranks").serve(device)
