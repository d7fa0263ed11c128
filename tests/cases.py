"""The named shapes that tests and benchmarks share, and the data for them."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "complex64": np.dtype(np.complex64),
    "complex128": np.dtype(np.complex128),
}


class Case(NamedTuple):
    """One problem. `a`, `h0` and `reset` are shapes: by default b's own, absent, absent."""

    name: str
    shape: tuple[int, ...]
    axis: int = -2
    reverse: bool = False
    a: tuple[int, ...] | None = None
    h0: tuple[int, ...] | None = None
    reset: tuple[int, ...] | None = None

    @property
    def step(self) -> tuple[int, ...]:
        axis = self.axis % len(self.shape)
        return (*self.shape[:axis], *self.shape[axis + 1 :])


# Small problems that between them take every path: shapes around the edges of tiles and vectors,
# every position of time, every way to broadcast, with and without h0 and resets, both directions.
SMALL = (
    Case("one element", (1, 1, 1)),
    Case("one element with h0", (1, 1, 1), h0=(1, 1)),
    Case("one step", (2, 1, 3), h0=(2, 3)),
    Case("one step reversed", (2, 1, 3), reverse=True),
    Case("one channel", (1, 130, 1), h0=(1, 1)),
    Case("odd channels", (2, 33, 3), h0=(2, 3)),
    Case("odd channels reversed", (2, 33, 3), reverse=True, h0=(2, 3)),
    Case("rows", (3, 64, 32)),
    Case("rows and one", (3, 65, 33), reverse=True, reset=(3, 65)),
    Case("a vector less one", (1, 127, 31), h0=(1, 31)),
    Case("wide", (2, 5, 1025), h0=(2, 1025)),
    Case("wider than a tile", (1, 9, 4099), reverse=True),
    Case("few steps", (3, 3, 1028), reverse=True, reset=(3, 3), h0=(3, 1028)),
    Case("rank 1", (100,), axis=-1, h0=()),
    Case("rank 1 reversed", (257,), axis=0, reverse=True),
    Case("rank 2", (129, 7), h0=(7,)),
    Case("rank 2, time first and last", (7, 129), axis=-1, h0=(7,), reset=(129,)),
    Case("rank 4", (2, 3, 40, 5), h0=(3, 5)),
    Case("rank 5, time in the middle", (2, 3, 17, 2, 3), axis=2, reset=(3, 17)),
    Case("time first", (66, 2, 9), axis=0, h0=(2, 9), reset=(66,)),
    Case("time last", (2, 3, 66), axis=-1, h0=(2, 3), reverse=True),
    Case("time last, long", (3, 1500), axis=-1, reset=(3, 1500), h0=(3,)),
    Case("resets", (2, 70, 5), reset=(2, 70), h0=(2, 5)),
    Case("resets shared over the batch", (3, 70, 5), reset=(70,), reverse=True),
    Case("resets at every step", (2, 9, 4), reset=(2, 1), h0=(2, 4)),
    Case("a shared over batch and time", (4, 50, 6), a=(6,), h0=(4, 6)),
    Case("a shared over the batch", (4, 50, 6), a=(50, 6), h0=(6,)),
    Case("a shared over channels", (4, 50, 6), a=(4, 50, 1), reset=(50,)),
    Case("a shared over time", (4, 50, 6), a=(4, 1, 6), reverse=True),
    Case("a one number", (4, 50, 6), a=(), h0=(1, 1)),
    Case("a depends on time alone", (2, 50, 6), a=(50, 1), h0=(2, 1), reverse=True),
    Case("a alternates", (2, 3, 20, 2, 3), axis=2, a=(2, 1, 20, 1, 3), h0=(1, 3, 2, 1)),
    Case("empty time", (2, 0, 3), h0=(2, 3)),
    Case("empty time, shared a", (2, 0, 3), a=(3,)),
    Case("empty batch", (0, 5, 3), h0=(3,)),
    Case("no channels", (2, 5, 0), a=(5, 1), reset=(5,)),
)

# Lengths around the edges of warps, tiles and blocks.
LENGTHS = (
    8,
    31,
    32,
    33,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    255,
    257,
    511,
    513,
    1000,
    1023,
    1024,
    1025,
)

# Problems with many steps, many channels or many rows.
LARGE = (
    Case("long", (1, 43884, 16), h0=(1, 16)),
    Case("long reversed, time last", (3, 10007), axis=-1, reverse=True, h0=(3,)),
    Case("long, one channel", (1, 9001, 1)),
    Case("chunks", (2, 4097, 40), reset=(4097,)),
    Case("chunks, a per channel", (2, 1100, 40), a=(40,), h0=(2, 40)),
    Case("chunks, a shared over the batch", (3, 2049, 33), a=(2049, 33), reverse=True),
    Case("chunks, a shared over channels", (2, 4100, 40), a=(2, 4100, 1), reset=(4100,)),
    Case("turns, a shared over the batch", (4, 1500, 100), a=(1500, 100), h0=(4, 100)),
    Case("many turns", (150, 90, 24), a=(90, 24), reset=(150, 90), reverse=True),
    Case("narrow rows", (5, 1100, 13), reset=(5, 1100), h0=(5, 13)),
    Case("narrow rows reversed", (4, 700, 6), reverse=True, a=(700, 6)),
    Case("many channels", (1, 16, 120000), h0=(120000,)),
    Case("many rows", (70000, 16, 1), reverse=True),
    Case("many rows, shared a", (3000, 16, 3), a=(3,)),
)


class Arguments(NamedTuple):
    a: np.ndarray
    b: np.ndarray
    h0: np.ndarray | None
    reset: np.ndarray | None


def arguments(case: Case, a: str = "float32", b: str | None = None, seed: int = 0) -> Arguments:
    """Factors of modulus 0.8 to 1.05: a memory of a dozen steps, and no two steps alike."""
    rng = np.random.default_rng(seed)
    factor = rng.uniform(0.8, 1.05, case.shape if case.a is None else case.a)
    if a.startswith("complex"):
        factor = factor * np.exp(2j * np.pi * rng.uniform(size=factor.shape))
    else:
        factor = factor * rng.choice([-1, 1], size=factor.shape)
    b = b or a
    return Arguments(
        np.asarray(factor, DTYPES[a]),
        normal(rng, case.shape, b),
        None if case.h0 is None else normal(rng, case.h0, b),
        None if case.reset is None else rng.uniform(size=case.reset) < 0.1,
    )


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    x = rng.normal(size=shape)
    if dtype.startswith("complex"):
        x = x + 1j * rng.normal(size=shape)
    return np.asarray(x, DTYPES[dtype])
