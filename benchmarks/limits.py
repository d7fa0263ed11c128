"""The limit: the fastest elementwise operations that read and write what a scan does."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from timing import Timed, forward_chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from data import Data
    from problems import Problem


# A function and its arguments.
Program = tuple["Callable[..., Any]", tuple[Any, ...]]


# ---- As XLA's programs ---------------------------------------------------------------------------
#
# Written so that values stay in range however often their result becomes an operand.


def _multiply_add(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a * b + 1).astype(b.dtype)


def _add(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a + b).astype(b.dtype)


def _two_out(a: jax.Array, h: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return ((a + h - g) * 0.5).astype(h.dtype), ((a - h + g) * 0.5).astype(g.dtype)


def _one_out(a: jax.Array, h: jax.Array, g: jax.Array) -> jax.Array:
    return ((a - h + g) * 0.5).astype(g.dtype)


def forward_programs(data: Data, calls: int) -> dict[str, Program]:
    """By name the programs that move what a forward pass does: a and b in, h out."""
    return {
        f"XLA {name}": (forward_chain(f, calls), ((data.a,), data.b))
        for name, f in (("a b + 1", _multiply_add), ("a + b", _add))
    }


def backward_programs(data: Data, calls: int) -> dict[str, Program]:
    """a, h and g in, da and db out; of a broadcast `a` the gradient is too small to count."""
    if data.a.shape != data.b.shape:

        def swapped(factors: tuple[jax.Array], g: jax.Array, h: jax.Array) -> Any:
            return forward_chain(lambda a, g: _one_out(a, h, g), calls)(factors, g)

        return {"XLA": (swapped, ((data.a,), data.g, data.b))}

    def chained(a: jax.Array, h: jax.Array, g: jax.Array) -> Any:
        for _ in range(calls):
            h, g = jax.lax.optimization_barrier(_two_out(a, h, g))
        return h, g

    return {"XLA": (chained, (data.a, data.b, data.g))}


# ---- With torch, in a CUDA graph -----------------------------------------------------------------


def torch_add(problem: Problem, calls: int) -> Timed | None:
    """torch.add of arrays of b's size, in a graph; None where it would not be like for like."""
    if jax.default_backend() != "gpu" or problem.a_shape or problem.a_dtype:
        return None
    torch = _torch()
    if torch is None:
        return None
    dtype = getattr(torch, problem.dtype)
    x, y = (torch.rand(problem.shape, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(x)
    return captured(lambda: torch.add(x, y, out=out), calls)


@functools.cache
def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return torch if torch.cuda.is_available() else None


def release() -> None:
    """Gives the memory that torch does not use any more back to the device."""
    if jax.default_backend() == "gpu" and (torch := _torch()) is not None:
        torch.cuda.empty_cache()


def captured(function: Callable[[], Any], calls: int) -> Timed:
    """A CUDA graph of `calls` calls of a function that queues torch's kernels.

    It is captured on torch's current stream, if that is not the default one: gradients run on the
    stream of their forward pass.
    """
    import torch

    for _ in range(2):
        function()
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream()
    stream = None if stream == torch.cuda.default_stream() else stream
    graph = torch.cuda.CUDAGraph()
    # JAX's threads may do meanwhile what a capture forbids to its own.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            function()
    return Timed(graph.replay, calls, lambda _: torch.cuda.synchronize())


# ---- On a CPU, in C++ ----------------------------------------------------------------------------


@functools.cache
def _triad() -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        raise RuntimeError("the limit on a CPU is a C++ program, but there is no c++ here")
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    library = Path(folder.name) / "triad.so"
    source = Path(__file__).parent / "triad.cc"
    flags = ["-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    found = ctypes.CDLL(str(library))
    found.triad_new.restype = ctypes.c_void_p
    found.triad_new.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_size_t, *[ctypes.c_int] * 2]
    found.triad_run.argtypes = [ctypes.c_void_p, ctypes.c_int]
    found.triad_free.argtypes = [ctypes.c_void_p]
    return found


@contextlib.contextmanager
def triads(problem: Problem, direction: str, calls: int) -> Iterator[dict[str, Timed]]:
    """By name C++ loops over arrays of as many bytes, with ordinary and with streaming stores."""
    reads, writes = (2, 1) if direction == "forward" else (3, 2)
    if problem.a_shape:
        reads, writes = reads - 1, 1
    size = problem.moved_bytes(direction) // (reads + writes) // 4
    library = _triad()
    cores = len(os.sched_getaffinity(0))
    made = {}
    for threads in {1, cores}:
        for streaming in (0, 1):
            name = f"C++, {threads} threads{', streaming' if streaming else ''}"
            made[name] = library.triad_new(reads, writes, size, threads, streaming)
    try:
        yield {
            name: Timed(functools.partial(library.triad_run, handle, calls), calls, lambda _: None)
            for name, handle in made.items()
        }
    finally:
        for handle in made.values():
            library.triad_free(handle)
