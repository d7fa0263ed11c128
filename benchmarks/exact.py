"""The scan and its gradients in double precision on the host, for long arrays too."""

from __future__ import annotations

import math

import numpy as np


def scan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """h[t] = a[t] h[t-1] + b[t] along the first axis, from zero.

    Time is cut into chunks that are walked side by side; then the state that enters each chunk is
    added, times the product of the factors since. For moduli up to 1 that is as exact as the loop.
    """
    length, *rest = b.shape
    steps = max(1, math.isqrt(length))
    chunks = -(-length // steps)
    missing = ((0, chunks * steps - length), *((0, 0) for _ in rest))
    a, b = (np.pad(x, missing).reshape(chunks, steps, *rest) for x in (a, b))
    h, product = b.copy(), a.copy()
    for t in range(1, steps):
        h[:, t] += a[:, t] * h[:, t - 1]
        product[:, t] *= product[:, t - 1]
    for c in range(1, chunks):
        h[c] += product[c] * h[c - 1, -1]
    return h.reshape(chunks * steps, *rest)[:length]


def value_and_gradients(
    a: np.ndarray,
    b: np.ndarray,
    g: np.ndarray,
    h0: np.ndarray | None = None,
    reset: np.ndarray | None = None,
    gstate: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """h, da, db and dh0 for arrays of one shape with time first, in the order of the scan."""
    a, b = a.copy(), b.copy()
    if reset is not None:
        a[reset] = 0
    first = a[0].copy()
    cut = a == 0
    a[0] = 0
    if h0 is not None:
        b[0] += first * h0
    h = scan(a, b)
    g = g.copy()
    if gstate is not None:
        g[-1] += gstate
    # u[t] = g[t] + a[t+1] u[t+1]
    following = np.concatenate([a[1:], np.zeros_like(a[:1])])
    u = scan(following[::-1], g[::-1])[::-1]
    before = np.zeros_like(first) if h0 is None else h0
    da = np.where(cut, 0, u * np.concatenate([before[None], h[:-1]]))
    return {"h": h, "da": da, "db": u, "dh0": first * u[0]}
