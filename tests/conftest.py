"""Strict settings for every test, and the machine that the suite runs on.

One suite serves every backend: tests run on JAX's default device. Those marked `gpu` need one and
are deselected elsewhere, unless JAX_SCAN_TEST_GPU=1 promises it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# The CPU counts as eight devices, over which tests/devices.py makes meshes.
jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample", type=int, metavar="N", help="of a test's sets of parameters, N spread evenly"
    )


def pytest_report_header() -> str:
    import jax_scan

    return f"jax {jax.__version__} on {jax.devices()[0].device_kind}; kernels: {jax_scan.kernels()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if sample := config.getoption("sample"):
        _deselect(config, items, _beyond(items, sample))
    if jax.default_backend() == "gpu":
        return
    if os.environ.get("JAX_SCAN_TEST_GPU") == "1":
        raise pytest.UsageError("JAX_SCAN_TEST_GPU=1, but JAX finds no GPU")
    _deselect(config, items, {item for item in items if item.get_closest_marker("gpu")})


def _beyond(items: list[pytest.Item], sample: int) -> set[pytest.Item]:
    """All but `sample` sets of parameters of each test, from the first to the last."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {
        item
        for test in tests.values()
        for k, item in enumerate(test)
        if k * sample // len(test) == (k - 1) * sample // len(test)
    }


def _deselect(config: pytest.Config, items: list[pytest.Item], left: set[pytest.Item]) -> None:
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def python() -> Callable[..., str]:
    """Runs code in a fresh interpreter on the CPU; warnings are errors. Returns what it prints."""

    def run(code: str, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "error", "-c", textwrap.dedent(code)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
