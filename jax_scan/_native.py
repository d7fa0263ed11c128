"""Finds the compiled modules, checks that they fit the installed JAX, registers their targets.

Nothing here starts a backend or needs a GPU: JAX keeps a registration until its platform is used.
"""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from pathlib import Path
from types import ModuleType

import jax
from jax import export

TARGETS = {op: f"jax_scan.v1.{op}" for op in ("scan", "tangent", "cotangent")}
SUMMARY = "jax_scan.v1.summary"  # on CUDA alone

# The modules in use, and for the others the reason why they are not.
_modules: dict[str, ModuleType] = {}
_reasons: dict[str, str] = {}


def load() -> None:
    """Registers the CPU module, which must be there, and the CUDA module, which need not."""
    _modules["cpu"] = _load("jax_scan._cpu", "cpu")
    try:
        _modules["cuda"] = _load("jax_scan._cuda", "CUDA")
    except Exception as error:
        # Whatever is wrong with it, the CPU works; kernels() and the lowering for CUDA tell why.
        _reasons["cuda"] = str(error)


def kernels() -> dict[str, str]:
    """For each platform that has kernels, "available" or the reason why not.

    It says what is installed, not which devices this machine has.
    """
    return {platform: _reasons.get(platform, "available") for platform in ("cpu", "cuda")}


def export_checks() -> list[export.DisabledSafetyCheck]:
    """The `disabled_checks` that `jax.export.export` needs where a scan takes part.

    JAX asks for it since it can't know whether the targets of a custom call stay compatible. Those
    of this package carry a version in their names: a target's meaning never changes. The process
    that loads the export must import `jax_scan` first.
    """
    return [export.DisabledSafetyCheck.custom_call(name) for name in (*TARGETS.values(), SUMMARY)]


def module(platform: str) -> ModuleType:
    """The compiled module of a platform, or an error with the reason why there is none."""
    if platform not in _modules:
        raise RuntimeError(f"jax_scan has no {platform} kernel here. {_reasons.get(platform, '')}")
    return _modules[platform]


def _load(name: str, platform: str) -> ModuleType:
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"{name} was not built. {_remedy(name)}") from error
    except ImportError as error:
        raise ImportError(f"{name} does not load: {error}. {_remedy(name)}") from error
    _check_api(name, tuple(found.ffi_api_version), _installed_api())
    for target, handler in found.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform=platform)
        # XLA may split calls that carry `num_batch_dims` over its devices.
        jax.ffi.register_ffi_target_as_batch_partitionable(target)
    return found


def _remedy(name: str) -> str:
    if name.endswith("_cuda"):
        if _modules["cpu"].cpu_only:
            return (
                "The build was asked for the CPU alone, with JAX_SCAN_CUDA=OFF. For NVIDIA GPUs: "
                "`JAX_SCAN_CUDA=ON pip install .` in the source tree."
            )
        return (
            "Put nvcc on PATH and build with JAX_SCAN_CUDA=ON, which says what is missing: "
            "`JAX_SCAN_CUDA=ON pip install .` in the source tree."
        )
    return (
        "Build it with `pip install .` in the source tree; to run from the source tree itself, "
        "`pip install --no-build-isolation -e .`."
    )


def _check_api(name: str, compiled: tuple[int, ...], installed: tuple[int, ...]) -> None:
    """A module runs where XLA's FFI is of the same major version and no older than its headers.

    JAX itself notices too late: it takes the registration and fails to start the backend
    afterwards.
    """
    if compiled[0] == installed[0] and compiled <= installed:
        return
    have, need = ".".join(map(str, installed)), ".".join(map(str, compiled))
    raise ImportError(
        f"{name} was built for version {need} of XLA's FFI, but jaxlib "
        f"{metadata.version('jaxlib')} has version {have}. "
        "Install a newer jaxlib, or build jax_scan again where this one is installed: "
        "`pip install --no-build-isolation .` in the source tree."
    )


def _installed_api() -> tuple[int, int]:
    """The version of XLA's FFI in the installed jaxlib; only its header tells."""
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")
    text = header.read_text()
    found = [re.search(rf"#define XLA_FFI_API_{part} +(\d+)", text) for part in ("MAJOR", "MINOR")]
    if not all(found):
        raise ImportError(f"{header} does not say which version of XLA's FFI this is")
    major, minor = (int(match.group(1)) for match in found if match)
    return major, minor
