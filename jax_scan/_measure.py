"""How long a call takes, and how long it would take at the speed of the memory."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from collections.abc import Callable

_QUEUED = 50


def microseconds(function: Callable[..., Any], *args: Any, budget: float = 0.5) -> float:
    """The time of one call of a compiled function: the median over batches of calls.

    On a GPU a batch is a queue of up to 50 calls, so that the device, not the launch of a single
    call, is what is timed. On a CPU, where two calls may share the cores, it is one call. All
    batches together take about `budget` seconds, but there are at least three.
    """
    jax.block_until_ready(function(*args))  # compiles
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    once = time.perf_counter() - start
    queued = 1 if jax.default_backend() == "cpu" else max(1, min(_QUEUED, int(budget / 3 / once)))
    times = []
    spent = 0.0
    while len(times) < 3 or (spent < budget and len(times) < 200):
        start = time.perf_counter()
        for _ in range(queued):
            out = function(*args)
        jax.block_until_ready(out)
        spent += time.perf_counter() - start
        times.append((time.perf_counter() - start) / queued)
    return statistics.median(times) * 1e6


def two_in_one_out(a: jax.Array, b: jax.Array) -> jax.Array:
    """Reads and writes what the scan does: its limit."""
    return (a * b + 1).astype(b.dtype)


def three_in_two_out(a: jax.Array, h: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads and writes what the gradient of the scan does, given h: its limit."""
    return (g * h + a).astype(a.dtype), (g * a + h).astype(g.dtype)
