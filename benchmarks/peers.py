"""What else computes h[t] = a[t] h[t-1] + b[t] in JAX and, on a CPU, in NumPy and numba."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from collections.abc import Callable

    from data import Data
    from problems import Problem

# On a GPU lax.scan launches kernels at each step; beyond this its rows would take the most of the
# time.
_LAX_SCAN_MAX = 4096
# NumPy's loop takes some microseconds for each step.
_NUMPY_MAX = 1 << 16


def jax_peers(problem: Problem) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """By name the scans of JAX itself: (a, b) -> h."""
    if not problem.peers:
        return {}
    found = {"lax.associative_scan": functools.partial(_associative_scan, problem.axis)}
    if jax.default_backend() == "cpu" or (problem.length <= _LAX_SCAN_MAX and not problem.short):
        found["lax.scan"] = functools.partial(_scan, problem.axis)
    return found


def _associative_scan(axis: int, a: jax.Array, b: jax.Array) -> jax.Array:
    def compose(first: Any, then: Any) -> Any:
        return then[0] * first[0], then[0] * first[1] + then[1]

    a = jnp.broadcast_to(a, b.shape).astype(b.dtype)
    return lax.associative_scan(compose, (a, b), axis=axis)[1]


def _scan(axis: int, a: jax.Array, b: jax.Array) -> jax.Array:
    def step(h: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h = now[0] * h + now[1]
        return h, h

    a = jnp.broadcast_to(a, b.shape).astype(b.dtype)
    time_first = jnp.moveaxis(a, axis, 0), jnp.moveaxis(b, axis, 0)
    h = lax.scan(step, jnp.zeros_like(time_first[1][0]), time_first)[1]
    return jnp.moveaxis(h, 0, axis)


# ---- On the host ---------------------------------------------------------------------------------


def host_peers(problem: Problem, data: Data) -> dict[str, dict[str, Callable[[], Any]]]:
    """By direction and name loops over float32 (B, L, D) arrays: () -> {what: its value}."""
    found: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "backward": {}}
    if jax.default_backend() != "cpu" or problem.peers != "all":
        return found
    a, b, g = (np.asarray(x) for x in (data.a, data.b, data.g))
    loops: dict[str, tuple[Any, Any]] = {}
    if problem.length <= _NUMPY_MAX:
        loops["NumPy"] = (_numpy_forward, _numpy_backward)
    if importlib.util.find_spec("numba"):
        loops["numba"] = _numba_loops()
    for name, (forward, backward) in loops.items():
        h, da, db = (np.empty_like(b) for _ in range(3))
        forward(a, b, h)  # the backward loop needs it

        def run_forward(forward: Any = forward, h: Any = h) -> dict[str, np.ndarray]:
            forward(a, b, h)
            return {"h": h}

        def run_backward(backward: Any = backward, *arrays: Any) -> dict[str, np.ndarray]:
            backward(*arrays)
            return {"da": arrays[-2], "db": arrays[-1]}

        found["forward"][name] = run_forward
        found["backward"][name] = functools.partial(run_backward, backward, a, h, g, da, db)
    return found


def _numpy_forward(a: np.ndarray, b: np.ndarray, h: np.ndarray) -> None:
    h[:, 0] = b[:, 0]
    for t in range(1, b.shape[1]):
        np.multiply(a[:, t], h[:, t - 1], out=h[:, t])
        h[:, t] += b[:, t]


def _numpy_backward(
    a: np.ndarray, h: np.ndarray, g: np.ndarray, da: np.ndarray, db: np.ndarray
) -> None:
    length = g.shape[1]
    db[:, -1] = g[:, -1]
    for t in range(length - 2, -1, -1):
        np.multiply(a[:, t + 1], db[:, t + 1], out=db[:, t])
        db[:, t] += g[:, t]
    da[:, 0] = 0
    np.multiply(db[:, 1:], h[:, :-1], out=da[:, 1:])


@functools.cache
def _numba_loops() -> tuple[Callable[..., None], Callable[..., None]]:
    numba = importlib.import_module("numba")
    prange = numba.prange

    @numba.njit(parallel=True)
    def forward(a, b, h):
        batch, length, channels = b.shape
        for i in prange(batch):
            for d in range(channels):
                h[i, 0, d] = b[i, 0, d]
            for t in range(1, length):
                for d in range(channels):
                    h[i, t, d] = a[i, t, d] * h[i, t - 1, d] + b[i, t, d]

    @numba.njit(parallel=True)
    def backward(a, h, g, da, db):
        batch, length, channels = g.shape
        for i in prange(batch):
            for d in range(channels):
                db[i, length - 1, d] = g[i, length - 1, d]
            for t in range(length - 1, 0, -1):
                for d in range(channels):
                    da[i, t, d] = db[i, t, d] * h[i, t - 1, d]
                    db[i, t - 1, d] = g[i, t - 1, d] + a[i, t, d] * db[i, t, d]
            for d in range(channels):
                da[i, 0, d] = 0

    return forward, backward
