"""A few hundred of the random calls of `fuzz`, always the same ones by default.

JAX_SCAN_TEST_EXAMPLES in the environment sets how many, other ones each time. Those that once
failed are written out here.
"""

from __future__ import annotations

import os
import time

import pytest
from fuzz import Call, Level, batch, verify

EXAMPLES = int(os.environ.get("JAX_SCAN_TEST_EXAMPLES", "0"))
PARTS = range(8)  # hypothesis varies what it has drawn: a few short runs see more than a long one


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_random_calls(part):
    count = max(EXAMPLES // len(PARTS), 1) if EXAMPLES else 20
    number = int(time.time()) + part if EXAMPLES else part
    done = batch(count, number, shrink=bool(EXAMPLES))
    print(dict(sorted(done.counts.items())))
    assert not done.failures, done.failures[0]


def once_failed(shapes, dtypes="float32 float32 float32 float32", order="R", moving="h0", **other):
    """A call with time first; dtypes of a, b, h and h0."""
    named = dict(zip(["a", "b", "out", "h0"], dtypes.split(), strict=True))
    plain = Call(
        shapes, named, axis=0, reverse=False, return_state=False, order=order,
        moving=frozenset(moving.split()), levels=(), outside=0, arrays="plain", compiled=True,
        extreme=True, seed=0,
    )  # fmt: skip
    return plain._replace(**other)


DOUBLE = "float32 float64 float64 float64"
ONCE_FAILED = {
    "a subnormal float32 times an infinite float64": once_failed(
        {"a": (2, 4, 16), "b": (2, 4, 16), "h0": (4, 16)}, DOUBLE, "value", "a", seed=3193259
    ),
    "a subnormal float32 times a huge float64": once_failed(
        {"a": (16,), "b": (16,), "h0": ()},
        DOUBLE,
        moving="a b h0",
        levels=(Level(2, frozenset({"a", "h0"}), 0),),
        seed=19477,
    ),
    "a subnormal float32 times a huge cotangent": once_failed(
        {"a": (1, 1, 33, 3, 4), "b": (1, 1, 33, 3, 4), "h0": (1, 33, 3, 4)}
    ),
    "a cotangent of h beyond float16": once_failed(
        {"a": (2, 1), "b": (2, 256)},
        "float32 float32 float16 float32",
        "RR",
        "a b",
        axis=1,
        extreme=False,
        seed=256,
    ),
    "a sum of cotangents in bfloat16": once_failed(
        {"a": (2,), "b": (2,), "h0": ()},
        "bfloat16 bfloat16 bfloat16 float32",
        levels=(Level(2, frozenset({"b"}), 0),),
        extreme=False,
    ),
    "a factor of zero times a tangent of h0 beyond float32": once_failed(
        {"a": (17, 2, 1), "b": (17, 2, 31), "h0": (1, 2)},
        "float32 float32 float32 float64",
        "F",
        "a b h0",
        axis=2,
        seed=2,
    ),
    "the same, complex": once_failed(
        {"a": (65, 33, 2), "b": (65, 33, 2), "h0": (33, 1), "reset": (65,)},
        "complex64 complex64 complex64 complex128",
        "F",
        "a b h0",
        reverse=True,
        seed=11074,
    ),
    "a factor of zero times a cotangent that overflows": once_failed(
        {"a": (1, 4, 257, 1, 4), "b": (1, 4, 257, 1, 4), "h0": (1,) * 4, "reset": (1, 1, 257)},
        moving="a",
        axis=2,
        levels=(Level(2, frozenset({"b"}), 0), Level(2, frozenset({"a"}), 0)),
    ),
    "a subnormal factor that decides what overflows in float16": once_failed(
        {"a": (3, 16, 31), "b": (3, 16, 31), "reset": (3, 16, 31)},
        "float32 float32 float16 float32",
        "value",
        "a",
        axis=2,
        seed=85539,
    ),
}


@pytest.mark.parametrize("name", ONCE_FAILED)
def test_what_once_failed(name):
    verify(ONCE_FAILED[name])
