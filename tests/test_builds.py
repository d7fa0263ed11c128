"""What the compiled modules hold and need; what building them does, .ci/run checks."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from jax_scan import _native

ROOT = Path(__file__).parent.parent
MODULES = sorted(_native._modules)

sources = pytest.mark.skipif(
    not (ROOT / "CMakeLists.txt").exists(), reason="tests without the rest of the source tree"
)


@pytest.fixture
def cuda():
    if _native.kernels()["cuda"] != "available":
        pytest.skip("the CUDA module is not here")
    return _native.module("cuda")


def run(program: str, *args: str) -> str:
    if not shutil.which(program):
        pytest.skip(f"{program} is not here")
    return subprocess.run([program, *args], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("platform", MODULES)
def test_B5_no_cuda_library_is_needed(platform):
    """The CUDA runtime is inside, and the driver is found by it: a stale path changes nothing."""
    needed = re.findall(
        r"NEEDED.*\[(.*)\]", run("readelf", "-d", _native.module(platform).__file__)
    )
    assert needed
    assert not [name for name in needed if "cuda" in name or "nv" in name], needed


@pytest.mark.parametrize("platform", MODULES)
def test_B5_no_symbol_of_a_library_is_exported(platform):
    """So that another extension's copy of the CUDA runtime or of nanobind is not taken for it."""
    exported = run("nm", "-D", "--defined-only", _native.module(platform).__file__).split("\n")
    names = [line.split()[-1] for line in exported if line]
    assert f"PyInit__{platform}" in names
    assert not [name for name in names if re.match("cu(da)?[A-Z]|nvrtc|nvptx", name)]


def test_B2_architectures_are_plain(cuda):
    """None with the suffix of one architecture alone, which later ones don't run."""
    architectures = cuda.architectures.split(";")
    assert architectures
    assert all(re.fullmatch(r"\d+(-real|-virtual)?", arch) for arch in architectures)


def test_B2_every_architecture_is_there(cuda):
    listed = run("cuobjdump", "--list-elf", "--list-ptx", cuda.__file__)
    numbers = [re.sub(r"\D", "", arch) for arch in cuda.architectures.split(";")]
    for arch in numbers:
        assert f"sm_{arch}." in listed
    if len(numbers) > 1:
        assert f"sm_{max(numbers, key=int)}.ptx" in listed


@sources
def test_B2_the_default_list():
    """From 7.5 to 12.0; CMake adds PTX of what has neither -real nor -virtual."""
    text = (ROOT / "CMakeLists.txt").read_text()
    numbers = [int(n) for n in re.findall(r"\b(\d{2,3})(?:-real)?\b(?=[; )\"\n])", text)]
    assert {75, 80, 86, 89, 90, 100, 120} <= set(numbers)


@sources
def test_B4_one_floor():
    """What is built against, what is asked for and what is tested are the same release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (floor,) = re.findall(r"jaxlib==([\d.]+)", " ".join(project["build-system"]["requires"]))
    assert f"jax>={floor}" in project["project"]["dependencies"]
    assert f"JAX {floor} and later" in (ROOT / "README.md").read_text()


@sources
def test_N6_no_fast_math():
    text = re.sub("#.*", "", (ROOT / "CMakeLists.txt").read_text())
    assert "-ffp-contract=off" in text
    assert not re.search("fast.?math|ffinite|fassociative|Ofast", text)
