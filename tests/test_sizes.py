"""Sizes beyond 16, 31 and 32 bits: elements, rows, channels, steps and bytes of the workspace.

Data are made where they are read: the element at (row, step, channel) is a function of the three
numbers, so the float64 loop can be run over any stretch of any channel alone. Factors are below 1,
so a loop that starts 512 steps before a stretch knows its states to more digits than float64 has.

Large cases run one at a time, each in a process of its own, which gives its memory back.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracles import Expected, Oracle, check

from jax_scan import _native, linear_scan

FULL = os.environ.get("JAX_SCAN_TEST_LOAD") == "1"
GIB = 2**30
MARGIN = 512
STRETCH = 64


class Size(NamedTuple):
    shape: tuple[int, int, int]  # rows, steps, channels
    dtype: str
    reverse: bool = False
    gradient: bool = True
    a: tuple[int, int, int] | None = None  # the shape of the factors, if it is another

    @property
    def bytes(self) -> int:
        """a, b and h; for the gradient a, h, g, da and db. Calls on a GPU have a workspace too."""
        one = math.prod(self.shape) * jnp.dtype(self.dtype).itemsize
        return one * ((3 if self.a else 6) if self.gradient else 2 if self.a else 3)


GPU = {
    "elements beyond 31 bits, bfloat16": Size((2, 2**20 + 3, 1040), "bfloat16"),
    "elements beyond 31 bits, float32": Size((3, 2**19 + 1, 1367), "float32", reverse=True),
    "elements beyond 32 bits, many rows": Size((2**26 + 5, 13, 5), "bfloat16"),
    "elements beyond 32 bits, many channels": Size((2, 33, 2**26 + 8), "bfloat16", reverse=True),
    "elements beyond 32 bits, many steps": Size((1, 2**24 + 3, 257), "bfloat16"),
    "elements beyond 32 bits, few channels": Size((1, 2**30 + 5, 4), "bfloat16", reverse=True),
    "steps beyond 31 bits, one channel": Size((1, 2**31 + 5, 1), "bfloat16"),
    "steps of 27 bits, one channel": Size((1, 2**27, 1), "float32"),
    "512000 steps": Size((1, 512000, 64), "float32", reverse=True),
    "elements beyond 32 bits, factors without time": Size(
        (2, 33, 2**26 + 8), "bfloat16", a=(2, 1, 2**26 + 8)
    ),
    "elements and steps beyond 32 bits, one factor": Size(
        (1, 2**32 + 5, 4), "bfloat16", reverse=True, gradient=False, a=(1, 1, 1)
    ),
}
CPU = {
    "steps of 24 bits, one channel": Size((1, 2**24, 1), "float32"),
    "512000 steps": Size((1, 512000, 16), "float32", reverse=True),
    "rows beyond 16 bits": Size((70000, 3, 20), "bfloat16"),
    "channels beyond 16 bits": Size((1, 3, 2**20 + 1), "float32", reverse=True),
    "factors without time": Size((2, 33, 2**16 + 8), "bfloat16", a=(2, 1, 2**16 + 8)),
    "one factor": Size((1, 2**16 + 5, 4), "bfloat16", gradient=False, a=(1, 1, 1)),
} | (
    {
        "elements beyond 31 bits, many rows": Size((2**25 + 3, 13, 5), "bfloat16", gradient=False),
        "elements beyond 31 bits, many steps": Size(
            (1, 2**23 + 3, 257), "bfloat16", gradient=False
        ),
        "steps of 27 bits, one channel": Size((1, 2**27, 1), "float32"),
    }
    if FULL
    else {}
)
SIZES = GPU if jax.default_backend() == "gpu" else CPU


# ---- Data that are a function of where they are --------------------------------------------------


def noise(row, step, channel):
    """32 bits that look random, of uint32 numbers, NumPy's or JAX's; all arithmetic wraps."""
    u = np.uint32
    x = row * u(2654435761) + step * u(2246822519) + channel * u(3266489917)
    x = (x ^ (x >> u(15))) * u(668265263)
    return x ^ (x >> u(13))


def factor(bits):
    """In [1/2, 1), exact in 8 bits."""
    return (bits % np.uint32(64)).astype(np.float32) / 128 + np.float32(0.5)


def term(bits):
    """In [-1, 1), exact in 8 bits."""
    return ((bits >> np.uint32(8)) % np.uint32(128)).astype(np.float32) / 64 - np.float32(1)


def whole(f, shape, dtype, salt: int) -> jax.Array:
    def index(axis):
        return lax.broadcasted_iota(np.uint64, shape, axis).astype(np.uint32)

    return f(noise(index(0) + np.uint32(salt), index(1), index(2))).astype(dtype)


def part(f, shape, salt: int, rows, steps, channels) -> np.ndarray:
    """Of some channels, over some steps: (steps, channels), or (1, channels) without time."""
    at = [np.asarray(x).astype(np.uint32) for x in (rows, steps, channels)]
    at = [x if n > 1 else 0 * x for x, n in zip(at, shape, strict=True)]
    steps = at[1][:, None] if shape[1] > 1 else at[1][:1, None]
    with np.errstate(over="ignore"):
        return f(noise(at[0] + np.uint32(salt), steps, at[2])).astype(np.float64)


# ---- What is compared ----------------------------------------------------------------------------


def places(size: Size) -> list[tuple[int, int, int]]:
    """Where stretches begin: corners, on both sides of 2^31 to 2^33 elements, and anywhere."""
    rows, steps, channels = size.shape
    rng = np.random.default_rng(0)
    total = rows * steps * channels
    flat = [0, total - 1, *(n + k for n in (2**31, 2**32, 2**33) for k in (-1, 0) if n + k < total)]
    found = [(i // (steps * channels), i // channels % steps, i % channels) for i in flat]
    found += [(rows - 1, 0, channels - 1), (rows - 1, steps - 1, 0), (0, steps - 1, channels - 1)]
    for step in rng.integers(steps, size=3):
        found += [
            (int(rng.integers(rows)), int(step), int(rng.integers(channels))) for _ in range(8)
        ]
    return [(r, max(0, min(t, steps - STRETCH)), c) for r, t, c in found]


@partial(jax.jit, static_argnums=4)
def stretch(x, row, step, channel, length):
    return lax.dynamic_slice(x, (row, step, channel), (1, length, 1))[0, :, 0]


def compare(name: str, x: jax.Array, size: Size, expected) -> None:
    """`expected(rows, steps, channels)`: what some channels hold over some steps."""
    length = min(STRETCH, x.shape[1])
    at = places(size if x.shape[1] > 1 else size._replace(shape=x.shape))
    for step in sorted({t for _, t, _ in at}):
        rows, channels = zip(*[(r, c) for r, t, c in at if t == step], strict=True)
        steps = np.arange(max(0, step - MARGIN), min(size.shape[1], step + length + MARGIN))
        keep = slice(step - steps[0], step - steps[0] + length)
        want = expected(rows, steps, channels)
        want = Expected(want.value[keep], want.bound[keep])
        got = [
            stretch(x, r, np.int64(step), c, length) for r, c in zip(rows, channels, strict=True)
        ]
        check(np.stack(got, 1), want, f"{name} of {size.shape} at {rows}, {step}, {channels}")


def run(size: Size) -> None:
    shape, a_shape, dtype = size.shape, size.a or size.shape, jnp.dtype(size.dtype)
    scan = partial(linear_scan, reverse=size.reverse)
    a = jax.jit(partial(whole, factor, a_shape, dtype, 1))()
    b = jax.jit(partial(whole, term, shape, dtype, 2))()

    def oracle(*at):
        given = part(factor, a_shape, 1, *at), part(term, shape, 2, *at)
        return Oracle(*given, axis=0, reverse=size.reverse, out_dtype=dtype, state="float32")

    h = jax.jit(scan)(a, b)
    assert h.dtype == dtype
    compare("h", h, size, lambda *at: oracle(*at).values()[0])
    del h
    if not size.gradient:
        return

    def gradients(a, b):
        return jax.vjp(scan, a, b)[1](whole(term, shape, dtype, 3))

    da, db = jax.jit(gradients, donate_argnums=(0, 1))(a, b)
    del a, b

    def cotangent(name, rows, steps, channels):
        if a_shape[1] == 1:  # a sum over all of time
            steps = np.arange(shape[1])
        at = rows, steps, channels
        return oracle(*at).cotangents(part(term, shape, 3, *at))[name]

    compare("da", da, size, partial(cotangent, "a"))
    compare("db", db, size, partial(cotangent, "b"))


# ---- Where it runs -------------------------------------------------------------------------------


def free_memory() -> int:
    """Bytes that a new process can have on the device."""
    if jax.default_backend() != "gpu":
        (kib,) = re.findall(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
        return int(kib) * 2**10
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    if not shutil.which(query[0]):
        return 2**63
    first = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return int(first) * 2**20


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One at a time, also among the processes of one test run."""
    path = Path(tempfile.gettempdir()) / f"jax_scan_test_sizes_{os.getuid()}"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_I1_I2_sizes(name):
    size = SIZES[name]
    if size.bytes < GIB:
        run(size)
        return
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    code = f"""
import jax
jax.config.update("jax_enable_x64", True)
import test_sizes
test_sizes.run(test_sizes.SIZES[{name!r}])
"""
    with alone():
        if free_memory() < 1.2 * size.bytes + 2 * GIB:
            pytest.skip(f"needs {size.bytes / GIB:.0f} GiB")
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            capture_output=True,
            text=True,
            timeout=540,
            check=False,
        )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("op", ["scan", "tangent", "cotangent"])
def test_I1_workspace_is_counted_in_64_bits(op):
    """The CUDA module tells it, on any machine."""
    if _native.kernels()["cuda"] != "available":
        pytest.skip("the CUDA module is not here")
    module = _native.module("cuda")
    per_channel = module.workspace_bytes_per_channel(op, 2**40, "complex128")
    assert per_channel > 2**32
    assert module.workspace_bytes(op, 2**16, 2**31, 2**16, "float32") > 0
    for time in (2**20, 2**31 + 5, 2**40):
        one, many = (module.workspace_bytes(op, n, time, 1, "float32") for n in (1, 3))
        assert 0 < one <= many < 2**62
