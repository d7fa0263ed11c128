"""The problems that the benchmarks run, by the case that each belongs to."""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    """One problem: a row for each direction."""

    case: str
    shape: tuple[int, ...]  # of b
    goals: tuple[float, float]  # limit / ours that is aimed at, forward and backward
    axis: int = 1
    dtype: str = "float32"  # of b and h
    a_dtype: str | None = None
    a_shape: tuple[int, ...] | None = None
    variant: str = "plain"  # or what is switched on
    graph: bool = False  # so short that launches would be timed: many in one graph

    @property
    def length(self) -> int:
        return self.shape[self.axis]


_FIRST = ((32, 4096, 256), (8, 2048, 2048), (4, 16384, 512))
_DTYPES = ("bfloat16", "float16", "float64", "complex64")
_VARIANTS = ("reverse", "h0", "reset", "return_state")


def _case(name: str, goals: tuple[float, float], *shapes: tuple[int, ...], **options) -> list:
    return [Problem(name, shape, goals, **options) for shape in shapes]


GPU = [
    *_case("many channels", (0.97, 0.95), *_FIRST),
    *_case("more channels", (0.95, 0.93), (4, 4096, 2560), (64, 1024, 512), (2, 4096, 4096)),
    *_case("few channels", (0.9, 0.88), (1, 65536, 256), (1, 1048576, 64), (1, 262144, 16)),
    *_case("launch-sized", (0.8, 0.75), (2, 4096, 64), (1, 2048, 1024), (16, 512, 128), graph=True),
    *_case("launch-sized", (0.8, 0.75), (1, 1, 1048576), axis=2, graph=True),
    *_case("odd", (0.8, 0.75), (7, 4097, 255)),
    *_case("odd", (0.8, 0.75), (3, 1000, 33), (32, 4095, 1), (5, 3001, 3), graph=True),
    *_case("time last", (0.93, 0.9), (32, 256, 4096), (8, 1536, 65536), axis=2),
    *(p for dtype in _DTYPES for p in _case("dtypes", (0.93, 0.9), *_FIRST, dtype=dtype)),
    *_case("dtypes", (0.93, 0.9), *_FIRST, dtype="bfloat16", a_dtype="float32"),
    *_case("a per channel", (0.95, 0.9), _FIRST[0], a_shape=(256,)),
    *_case("a shared over the batch", (0.92, 0.88), _FIRST[0], a_shape=(4096, 256)),
    *_case("a shared over channels", (0.92, 0.88), _FIRST[0], a_shape=(32, 4096, 1)),
    *(
        Problem("options", shape, (0.94, 0.92), variant=variant)
        for shape in (_FIRST[0], (1, 65536, 256))
        for variant in _VARIANTS
    ),
    *(
        Problem("length", (1, 2**k, 64), (0.0, 0.0), graph=k < 18)
        for k in range(12, 25)  # rows to compare with each other: no goal
    ),
]

FOUNDATION = [
    *_case("many channels", (0.85, 0.85), _FIRST[0], _FIRST[1]),
    *_case("few channels", (0.0, 0.0), (1, 65536, 256)),
    *_case("launch-sized", (0.0, 0.0), (2, 4096, 64), graph=True),
    *_case("odd", (0.0, 0.0), (7, 4097, 255)),
    *_case("time last", (0.0, 0.0), (32, 256, 4096), axis=2),
    *_case("dtypes", (0.0, 0.0), _FIRST[0], dtype="bfloat16"),
    *_case("a per channel", (0.0, 0.0), _FIRST[0], a_shape=(256,)),
    Problem("options", _FIRST[0], (0.0, 0.0), variant="reset"),
]

# Arrays of less than 32 MB: glibc maps larger ones afresh in each call, and page faults are all
# that one then measures.
CPU = [
    *_case("many channels", (0.0, 0.0), (4, 1024, 256), (8, 2048, 256), (2, 1024, 2048)),
    *_case("few channels", (0.0, 0.0), (1, 65536, 64), (1, 262144, 4)),
    *_case("odd", (0.0, 0.0), (7, 1001, 255)),
    *_case("time last", (0.0, 0.0), (8, 128, 4096), axis=2),
    *(p for t in _DTYPES for p in _case("dtypes", (0.0, 0.0), (4, 1024, 256), dtype=t)),
    *_case("dtypes", (0.0, 0.0), (4, 1024, 256), dtype="bfloat16", a_dtype="float32"),
    *_case("a per channel", (0.0, 0.0), (8, 2048, 256), a_shape=(256,)),
    *_case("a shared over the batch", (0.0, 0.0), (8, 2048, 256), a_shape=(2048, 256)),
    *_case("a shared over channels", (0.0, 0.0), (8, 2048, 256), a_shape=(8, 2048, 1)),
    *(Problem("options", (8, 2048, 256), (0.0, 0.0), variant=v) for v in _VARIANTS),
]

SETS = {"gpu": GPU, "foundation": FOUNDATION, "cpu": CPU}
