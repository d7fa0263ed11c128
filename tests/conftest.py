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


def pytest_report_header() -> str:
    import jax_scan

    return f"jax {jax.__version__} on {jax.devices()[0].device_kind}; kernels: {jax_scan.kernels()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if jax.default_backend() == "gpu":
        return
    if os.environ.get("JAX_SCAN_TEST_GPU") == "1":
        raise pytest.UsageError("JAX_SCAN_TEST_GPU=1, but JAX finds no GPU")
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


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
