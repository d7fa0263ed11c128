"""Errors of the scan and of its gradients beside those of a loop of the same precision.

What is measured, and how, says `benchmarks/numerics.py`, which docs/numerics.md reports.
"""

from __future__ import annotations

from pathlib import Path

import jax
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
# Products of factors close to 1, or equal at every step, are rounded the same way again and again.
# The CPU kernel makes up for that; the CUDA kernels do not yet, and are as exact as
# `lax.associative_scan`, roughly.
ADDS_UP = {
    *[("float32", decay) for decay in (0.99, 0.9999, 1.0001, "0.9998 to 1")],
    ("complex64", "turn"),
}


@pytest.mark.parametrize("dtype", DECAYS)
def test_N6_at_most_twice_the_loops_error(measure, dtype):
    on_gpu = jax.default_backend() == "gpu"
    for decay in DECAYS[dtype]:
        peer = on_gpu and (dtype, decay) in ADDS_UP
        rows = measure(dtype, decay, length=4000, channels=64, associative=peer)
        assert {row["what"] for row in rows} == {"h", "da", "db"}
        for row in rows:
            for kind, ratio in (("worst", "ratio"), ("norm", "ratio_of_norms")):
                if peer:
                    others = [row[kind][who] for who in ("sequential", "associative")]
                    assert row[kind]["ours"] <= 4 * max(others), row
                else:
                    assert row[ratio] <= 2, row


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
