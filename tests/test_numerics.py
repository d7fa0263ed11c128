"""Errors of the scan and of its gradients beside those of a loop of the same precision.

What is measured, and how, says `benchmarks/numerics.py`, which docs/numerics.md reports.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import normal

from jax_scan import linear_scan

FOLDER = Path(__file__).parents[1] / "benchmarks"
if not FOLDER.exists():
    pytest.skip("the benchmarks are not here", allow_module_level=True)


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import numerics

    return numerics.measure


DECAYS = {
    "float32": (0, 0.5, 0.99, 0.9999, 1, 1.0001, "0.9998 to 1", "random sign"),
    "complex64": (0.5, 0.9999, 1, 1.0001, "turn"),  # with a random phase, but for the last
    "bfloat16": (0.9999, 1.0001),
    "float16": (0.9999, "random sign"),
}


def at_most_twice(measure, dtype, decay, length, channels=64):
    rows = measure(dtype, decay, length=length, channels=channels, associative=False)
    assert {row["what"] for row in rows} == {"h", "da", "db"}
    for row in rows:
        for ratio in ("ratio", "ratio_of_norms"):
            # Rows of channels on the CPU round products and sums one by one. XLA's loop fuses them.
            assert row[ratio] <= 2 or row.get("rounded_loop"), row


@pytest.mark.parametrize("dtype", DECAYS)
def test_N6_at_most_twice_the_loops_error(measure, dtype):
    for decay in DECAYS[dtype]:
        at_most_twice(measure, dtype, decay, length=4000)


# Products of factors that are close to 1, or equal at every step, are rounded the same way again
# and again: kernels that compose the maps of many steps have to make up for that.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "decay", "length", "channels"),
    [
        ("float32", 0.9999, 40_000, 64),
        ("float32", "0.9998 to 1", 40_000, 64),
        ("float32", 1.0001, 400_000, 4),
        ("bfloat16", 0.9999, 40_000, 64),
        ("complex64", "turn", 40_000, 64),
    ],
)
def test_N6_errors_of_long_products_do_not_add_up(measure, dtype, decay, length, channels):
    at_most_twice(measure, dtype, decay, length, channels)


@pytest.mark.parametrize("channels", [1, 4, 40])
def test_overflow_comes_when_it_must(channels):
    """Growth by 1 % at each step: infinite from the same step on as the loop, up to one or two."""
    rng = np.random.default_rng(0)
    a, b = np.full((10_000, channels), 1.01, np.float32), normal(rng, (10_000, channels), "float32")
    h = np.asarray(linear_scan(a, b, axis=0))
    state, exact = np.zeros(channels), np.zeros(a.shape)
    for t in range(len(a)):
        exact[t] = state = a[t].astype(np.float64) * state + b[t]
    finite = np.abs(exact) < float(np.finfo(np.float32).max)
    assert not finite[-1].any()
    np.testing.assert_allclose(np.isfinite(h).sum(0), finite.sum(0), atol=2)
    assert not np.isnan(h).any()
    for c in range(channels):
        last = np.isfinite(h[:, c]).sum()
        assert np.isinf(h[last:, c]).all()
        assert (np.sign(h[last:, c]) == np.sign(exact[last:, c])).all()
