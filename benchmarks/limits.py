"""The limit: the fastest elementwise operations that read and write what a scan does."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any

import jax
import native
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
    return ((a + h - g) * 0.5).astype(a.dtype), ((a - h + g) * 0.5).astype(g.dtype)


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
            a, g = jax.lax.optimization_barrier(_two_out(a, h, g))
        return a, g

    return {"XLA": (chained, (data.a, data.b, data.g))}


# ---- On a GPU, in CUDA graphs of torch's ---------------------------------------------------------


def graphs(problem: Problem, direction: str, calls: int) -> dict[str, Timed]:
    """By name torch.add, where it is like for like, and plain CUDA kernels; none without torch."""
    torch = _torch()
    if torch is None:
        return {}
    found = {}
    if direction == "forward" and not problem.a_shape and not problem.a_dtype:
        dtype = getattr(torch, problem.dtype)
        x, y = (torch.rand(problem.shape, device="cuda").to(dtype) for _ in range(2))
        out = torch.empty_like(x)
        found["torch.add"] = captured(lambda: torch.add(x, y, out=out), calls)
    library = native.build("baselines.cu")
    if library is None:
        return found
    library.elementwise.argtypes = [
        *[ctypes.c_int] * 3,
        *[ctypes.c_void_p] * 5,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    reads, writes = _streams(problem, direction)
    words = -(-problem.moved_bytes(direction) // (reads + writes) // 16) * 4
    arrays = [
        torch.randint(-(2**31), 2**31, (words,), device="cuda", dtype=torch.int32)
        for _ in range(reads)
    ]
    arrays += [arrays[0]] * (3 - reads) + [torch.empty_like(arrays[0]) for _ in range(writes)]
    arrays += [arrays[3]] * (2 - writes)
    for unroll in (1, 4):

        def run(unroll: int = unroll) -> None:
            pointers = (x.data_ptr() for x in arrays)
            stream = torch.cuda.current_stream().cuda_stream
            if library.elementwise(reads, writes, unroll, *pointers, words // 4, stream):
                raise RuntimeError("the elementwise kernel can't be launched")

        found[f"CUDA, {unroll} x 16 bytes"] = captured(run, calls)
        expected = functools.reduce(torch.bitwise_xor, arrays[:reads])
        assert torch.equal(arrays[3], expected)
        assert writes == 1 or torch.equal(arrays[4], expected + arrays[0])
        arrays[3].zero_()
        arrays[4].zero_()
    return found


def _streams(problem: Problem, direction: str) -> tuple[int, int]:
    """How many arrays are read and written. A broadcast `a` and its gradient don't count."""
    reads, writes = (2, 1) if direction == "forward" else (3, 2)
    return (reads - 1, 1) if problem.a_shape else (reads, writes)


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
    found = native.build("triad.cc")
    if found is None:
        raise RuntimeError("the limit on a CPU is a C++ program, but there is no c++ here")
    found.triad_new.restype = ctypes.c_void_p
    found.triad_new.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_size_t, *[ctypes.c_int] * 2]
    found.triad_run.argtypes = [ctypes.c_void_p, ctypes.c_int]
    found.triad_free.argtypes = [ctypes.c_void_p]
    return found


@contextlib.contextmanager
def triads(problem: Problem, direction: str, calls: int) -> Iterator[dict[str, Timed]]:
    """By name C++ loops over arrays of as many bytes, with ordinary and with streaming stores."""
    reads, writes = _streams(problem, direction)
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
