"""The problems that the benchmarks run, by the case that each belongs to."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

BOTH = ("forward", "backward")
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex64": 8}


class Problem(NamedTuple):
    """One problem: a row for each direction.

    `peers` are JAX's own scans ("forward", or "jax" in both directions), or these and other
    packages and the CUDA baselines too ("all"). Gradients of JAX's scans take seconds to compile.
    """

    case: str
    shape: tuple[int, ...]  # of b
    goals: tuple[float, float]  # limit / ours that is aimed at, forward and backward
    axis: int = 1
    dtype: str = "float32"  # of b and h
    a_dtype: str | None = None
    a_shape: tuple[int, ...] | None = None
    variant: str = "plain"  # or what is switched on
    short: bool = False  # launches would be timed: many calls are chained in one program
    peers: str = ""
    directions: tuple[str, ...] = BOTH

    @property
    def length(self) -> int:
        return self.shape[self.axis]

    @property
    def full_a_shape(self) -> tuple[int, ...]:
        """The shape of a, with as many axes as b has."""
        a_shape = self.a_shape or self.shape
        return (1,) * (len(self.shape) - len(a_shape)) + a_shape

    def array_bytes(self) -> tuple[int, int]:
        """The sizes of a and of b."""
        a_dtype = self.a_dtype or self.dtype
        a, b = (
            math.prod(shape) * _BYTES[dtype]
            for shape, dtype in ((self.full_a_shape, a_dtype), (self.shape, self.dtype))
        )
        return a, b

    def moved_bytes(self, direction: str) -> int:
        """What has to be read and written once: a, b and h; or a, h, g, da and db."""
        a, b = self.array_bytes()
        return a + 2 * b if direction == "forward" else 2 * a + 3 * b

    def has_peers(self, direction: str) -> bool:
        return bool(self.peers) and (direction == "forward" or self.peers != "forward")

    def goal(self, direction: str) -> float:
        return self.goals[BOTH.index(direction)]

    def labels(self, direction: str) -> dict[str, Any]:
        """What tells a row from the others of its device."""
        dtype, variant = self.dtype, self.variant
        if self.a_dtype:
            dtype = f"a {self.a_dtype}, b {dtype}"
        if self.a_shape:
            variant = f"a {'x'.join(map(str, self.a_shape))}"
        elif self.axis == len(self.shape) - 1:
            variant = "time last"
        return {
            "case": self.case,
            "shape": list(self.shape),
            "dtype": dtype,
            "direction": direction,
            "variant": variant,
        }


_FIRST = ((32, 4096, 256), (8, 2048, 2048), (4, 16384, 512))
_DTYPES = ("bfloat16", "float16", "float64", "complex64")
_VARIANTS = ("reverse", "h0", "reset", "return_state")
_NO_GOAL = (0.0, 0.0)


def _case(name: str, goals: tuple[float, float], *shapes: tuple[int, ...], **options: Any) -> list:
    return [Problem(name, shape, goals, **options) for shape in shapes]


GPU = [
    *_case("many channels", (0.97, 0.95), *_FIRST, peers="all"),
    *_case("more channels", (0.95, 0.93), (4, 4096, 2560), peers="jax"),
    *_case("more channels", (0.95, 0.93), (64, 1024, 512), (2, 4096, 4096), peers="forward"),
    *_case("few channels", (0.9, 0.88), (1, 65536, 256), peers="all"),
    *_case("few channels", (0.9, 0.88), (1, 1048576, 64), peers="jax"),
    *_case("few channels", (0.9, 0.88), (1, 262144, 16), peers="forward"),
    *_case("launch-sized", (0.8, 0.75), (2, 4096, 64), short=True, peers="all"),
    *_case(
        "launch-sized", (0.8, 0.75), (1, 2048, 1024), (16, 512, 128), short=True, peers="forward"
    ),
    *_case("launch-sized", (0.8, 0.75), (1, 1, 1048576), axis=2, short=True, peers="forward"),
    *_case("odd", (0.8, 0.75), (7, 4097, 255), peers="jax"),
    *_case("odd", (0.8, 0.75), (3, 1000, 33), short=True, peers="forward"),
    *_case("odd", (0.8, 0.75), (32, 4095, 1), (5, 3001, 3), short=True, peers="forward"),
    *_case("time last", (0.93, 0.9), (32, 256, 4096), axis=2, peers="all"),
    *_case("time last", (0.93, 0.9), (8, 1536, 65536), axis=2),
    *_case("time last", _NO_GOAL, (32, 256, 4096), axis=2, dtype="bfloat16"),
    *(
        problem
        for dtype in _DTYPES
        for problem in (
            *_case("dtypes", (0.93, 0.9), _FIRST[0], dtype=dtype, peers="forward"),
            *_case("dtypes", (0.93, 0.9), *_FIRST[1:], dtype=dtype),
        )
    ),
    *_case("dtypes", (0.93, 0.9), *_FIRST, dtype="bfloat16", a_dtype="float32"),
    *_case("a per channel", (0.95, 0.9), _FIRST[0], a_shape=(256,), peers="jax"),
    *_case("a per channel", _NO_GOAL, _FIRST[2], a_shape=(512,), peers="forward"),
    *_case("a per channel", _NO_GOAL, (1, 65536, 256), a_shape=(256,), dtype="complex64"),
    *_case("few steps", _NO_GOAL, (64, 1, 4096), (4096, 16, 32), short=True, peers="forward"),
    *_case(
        "a shared over the batch", (0.92, 0.88), _FIRST[0], a_shape=(4096, 256), peers="forward"
    ),
    *_case(
        "a shared over channels", (0.92, 0.88), _FIRST[0], a_shape=(32, 4096, 1), peers="forward"
    ),
    # Their goal is to take no more than 1/0.97 of the time of the plain row of the same shape.
    *(
        Problem("options", shape, _NO_GOAL, variant=variant)
        for shape in (_FIRST[0], (1, 65536, 256))
        for variant in _VARIANTS
    ),
    # To be compared with each other: bytes per second must not fall as the length grows.
    *(
        Problem("length", (1, 2**k, 64), _NO_GOAL, short=k < 18, directions=("forward",))
        for k in range(12, 25)
    ),
]

FOUNDATION = [
    *_case("many channels", (0.85, 0.85), _FIRST[0], _FIRST[1], peers="jax"),
    *_case("few channels", _NO_GOAL, (1, 65536, 256), peers="jax"),
    *_case("launch-sized", _NO_GOAL, (2, 4096, 64), short=True, peers="jax"),
    *_case("odd", _NO_GOAL, (7, 4097, 255), peers="jax"),
    *_case("time last", _NO_GOAL, (32, 256, 4096), axis=2, peers="jax"),
    *_case("dtypes", _NO_GOAL, _FIRST[0], dtype="bfloat16", peers="jax"),
    *_case("a per channel", _NO_GOAL, _FIRST[0], a_shape=(256,), peers="jax"),
    Problem("options", _FIRST[0], _NO_GOAL, variant="reset"),
]

_CPU = (8, 4096, 256)
CPU = [
    *_case("many channels", (0.9, 0.85), _CPU, (32, 1024, 256), (4, 2048, 1024), peers="all"),
    *_case("few channels", _NO_GOAL, (1, 1048576, 16), (1, 262144, 1), peers="all"),
    *_case("time last", (0.75, 0.75), (8, 256, 4096), axis=2, peers="jax"),
    *_case("dtypes", (0.8, 0.8), _CPU, dtype="bfloat16", peers="jax"),
    *_case("dtypes", (0.8, 0.8), _CPU, dtype="float16", peers="jax"),
    *_case("dtypes", (0.85, 0.85), _CPU, dtype="float64", peers="jax"),
    *_case("dtypes", (0.85, 0.85), _CPU, dtype="complex64", peers="jax"),
    *_case("a per channel", (0.85, 0.85), _CPU, a_shape=(256,), peers="jax"),
    *_case("a shared over the batch", _NO_GOAL, _CPU, a_shape=(4096, 256), peers="jax"),
    *_case("a shared over channels", _NO_GOAL, _CPU, a_shape=(8, 4096, 1), peers="jax"),
    *_case("odd", _NO_GOAL, (7, 1001, 255), peers="jax"),
    # In the second and in the first level of cache, and a call that is all overhead.
    *_case("in cache", (0.67, 0.67), (4, 256, 64), (1, 32, 64), short=True, peers="jax"),
    *_case("small", _NO_GOAL, (2, 64, 16), peers="all"),
    *(Problem("options", _CPU, _NO_GOAL, variant=variant) for variant in _VARIANTS),
]

SETS = {"gpu": GPU, "foundation": FOUNDATION, "cpu": CPU}
