"""Compiles the C++ and CUDA sources beside this file, for the machine at hand, when first used."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_CXX_FLAGS = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread")
_NVCC_FLAGS = ("-O3", "-std=c++17", "-arch=native", "-shared", "-Xcompiler", "-fPIC")


@functools.cache
def start_build(source: str) -> tuple[subprocess.Popen, Path] | None:
    """Starts to compile a source; None where there is no compiler for it."""
    if source.endswith(".cu"):
        compiler, flags = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", _NVCC_FLAGS
    else:
        compiler, flags = os.environ.get("CXX") or "c++", _CXX_FLAGS
    if not shutil.which(compiler):
        return None
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    library = Path(folder.name) / "library.so"
    command = [compiler, *flags, str(Path(__file__).parent / source), "-o", str(library)]
    return subprocess.Popen(command), library


@functools.cache
def build(source: str) -> ctypes.CDLL | None:
    """The compiled source; None where there is no compiler for it."""
    building = start_build(source)
    if building is None:
        return None
    process, path = building
    if process.wait():
        raise RuntimeError(f"{source} can't be compiled")
    return ctypes.CDLL(str(path))
