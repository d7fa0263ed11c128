"""Finding and checking the compiled modules: each failure has one clear message."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import jax
import pytest

from jax_scan import _native


@pytest.fixture
def registered(monkeypatch):
    """Empties what is known of the modules, and records registrations instead of making them."""
    calls = []
    monkeypatch.setattr(_native, "_modules", {})
    monkeypatch.setattr(_native, "_reasons", {})
    monkeypatch.setattr(
        jax.ffi, "register_ffi_target", lambda *x, **kw: calls.append((*x, kw["platform"]))
    )
    return calls


def module(name, version=(0, 1), cpu_only=False, **handlers):
    fake: Any = ModuleType(f"jax_scan.{name}")
    fake.ffi_api_version = version
    fake.cpu_only = cpu_only
    fake.registrations = lambda: {f"jax_scan.v1.{k}": v for k, v in handlers.items()}
    return fake


@pytest.fixture
def install(monkeypatch):
    def put(fake, name=None):
        monkeypatch.setitem(sys.modules, name or fake.__name__, fake)

    return put


def test_X5_both_modules_are_registered_for_their_platforms(registered, install):
    install(module("_cpu", scan=1))
    install(module("_cuda", scan=2))
    _native.load()
    assert registered == [("jax_scan.v1.scan", 1, "cpu"), ("jax_scan.v1.scan", 2, "CUDA")]
    assert _native.kernels() == {"cpu": "available", "cuda": "available"}


def test_missing_cpu_module(registered, install):
    install(None, "jax_scan._cpu")
    with pytest.raises(
        ImportError, match=r"jax_scan._cpu was not built. Build it with `pip install .`"
    ):
        _native.load()
    assert not registered


def test_B1_X5_missing_cuda_module(registered, install):
    install(module("_cpu"))
    install(None, "jax_scan._cuda")
    _native.load()
    assert _native.kernels()["cpu"] == "available"
    assert "jax_scan._cuda was not built" in _native.kernels()["cuda"]
    assert "JAX_SCAN_CUDA=ON" in _native.kernels()["cuda"]
    with pytest.raises(RuntimeError, match=r"no cuda kernel here. jax_scan._cuda was not built"):
        _native.module("cuda")


@pytest.mark.parametrize("cpu_only", [False, True])
def test_a_missing_compiler_is_told_from_a_build_for_the_cpu_alone(registered, install, cpu_only):
    install(module("_cpu", cpu_only=cpu_only))
    install(None, "jax_scan._cuda")
    _native.load()
    reason = _native.kernels()["cuda"]
    assert ("nvcc" in reason, "JAX_SCAN_CUDA=OFF" in reason) == (not cpu_only, cpu_only)


def test_X5_broken_cuda_module(registered, install, tmp_path, monkeypatch):
    """A file that is no library: the loader's own words are kept."""
    import importlib.machinery

    import jax_scan

    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / f"_cuda{suffix}").write_bytes(b"this is no library")
    install(module("_cpu"))
    monkeypatch.delitem(sys.modules, "jax_scan._cuda", raising=False)
    monkeypatch.setattr(jax_scan, "__path__", [str(tmp_path)])
    _native.load()
    assert "jax_scan._cuda does not load: " in _native.kernels()["cuda"]
    assert "_cuda" in _native.kernels()["cuda"]


def test_cuda_module_that_needs_a_missing_package_names_it(registered, install, monkeypatch):
    install(module("_cpu"))

    def load(name):
        raise ModuleNotFoundError("No module named 'somewhere'", name="somewhere")

    real = _native.importlib.import_module
    monkeypatch.setattr(
        _native.importlib,
        "import_module",
        lambda name: load(name) if name.endswith("_cuda") else real(name),
    )
    _native.load()
    assert "somewhere" in _native.kernels()["cuda"]


@pytest.mark.parametrize("compiled", [(0, 99), (1, 0)])
def test_B3_too_new_a_build_is_refused_before_it_is_registered(registered, install, compiled):
    version = ".".join(map(str, compiled))
    install(module("_cpu", compiled, scan=1))
    with pytest.raises(
        ImportError,
        match=rf"jax_scan._cpu was built for version {version} of XLA's FFI, but jaxlib "
        rf"{metadata.version('jaxlib')} "
        r"has version 0\.\d+\. Install a newer jaxlib, or build jax_scan again",
    ):
        _native.load()
    assert not registered
    install(module("_cpu"))
    install(module("_cuda", compiled, scan=1))
    _native.load()
    assert f"jax_scan._cuda was built for version {version}" in _native.kernels()["cuda"]
    assert not registered


def test_B3_version_of_the_installed_headers(monkeypatch, tmp_path):
    major, minor = _native._installed_api()
    assert (major, minor) >= (0, 1)
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    header = tmp_path / "xla/ffi/api/c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 3\n#define XLA_FFI_API_MINOR 14\n")
    assert _native._installed_api() == (3, 14)
    header.write_text("nothing")
    with pytest.raises(ImportError, match=r"c_api.h does not say which version"):
        _native._installed_api()


def test_B3_the_modules_in_use_run_on_the_floor():
    for found in _native._modules.values():
        assert tuple(found.ffi_api_version) <= _native._installed_api()


def test_X5_failing_registration_of_cuda_is_kept(registered, install, monkeypatch):
    def register(*_, platform, **__):
        if platform == "CUDA":
            raise RuntimeError("Duplicate FFI handler registration")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", register)
    install(module("_cpu", scan=1))
    install(module("_cuda", scan=1))
    _native.load()
    assert "Duplicate FFI handler" in _native.kernels()["cuda"]
    assert "cuda" not in _native._modules


def test_targets_are_what_the_modules_register():
    for platform, found in _native._modules.items():
        own = {_native.SUMMARY} if platform == "cuda" else set()
        assert set(found.registrations()) == set(_native.TARGETS.values()) | own
