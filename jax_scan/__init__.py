"""Differentiable linear recurrences h[t] = a[t] h[t-1] + b[t] for JAX, on CPU and CUDA."""

from jax_scan import _lowering as _lowering
from jax_scan import _native
from jax_scan._api import linear_scan, save_scans
from jax_scan._native import export_checks, kernels
from jax_scan._sequence import sequence_parallel_scan

__all__ = ["export_checks", "kernels", "linear_scan", "save_scans", "sequence_parallel_scan"]

_native.load()
