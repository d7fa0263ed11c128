"""Runs random problems through a kernel, apart from JAX: `python tests/native/fuzz.py`.

Builds fuzz_cpu.cc or fuzz_cuda.cc with the kernel's sources, or with --objects what a CMake build
has made of them, runs it and adds a record of the run to a log. Needs a C++ compiler, and nvcc for
CUDA; neither JAX nor the package.

With --sanitize the run is watched: on the CPU by what -fsanitize is given (address,undefined or
thread), on a GPU by a tool of compute-sanitizer (memcheck, racecheck, synccheck or initcheck),
there with small problems whose arrays are allocations of their own.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_CSV = "--format=csv,noheader"
_FLAGS = ["-Wall", "-Wextra", "-ffp-contract=off", "-pthread"]


def main() -> int:
    arguments = _parse()
    on_cpu = arguments.platform == "cpu"
    commit = _commit()
    with tempfile.TemporaryDirectory() as folder:
        program = arguments.program or _build(arguments, Path(folder))
        command = [str(program.resolve()), str(arguments.problems), str(arguments.seed)]
        command += [str(arguments.workers or os.cpu_count() or 1)]
        if arguments.path:
            command += ["--path", arguments.path]
        if arguments.sanitize and not on_cpu:
            command += ["--separate", "--largest", "100000"]
            watch = ["compute-sanitizer", "--error-exitcode", "9", "--tool", arguments.sanitize]
            command = [*watch, *command]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(run.stdout, end="")
    lines = run.stdout.splitlines()
    summary = next((line for line in lines if line.startswith('{"platform"')), "{}")
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "device": _processor() if on_cpu else _asked(["nvidia-smi", "--query-gpu=name", _CSV]),
        "versions": _versions(on_cpu),
        "sanitizer": arguments.sanitize or "none",
        "path": arguments.path or "all",
        "exit_status": run.returncode,
        **json.loads(summary),
        "complaints": [line for line in lines if _complains(line)][:50],
    }
    if arguments.out:
        log = arguments.out
        records = json.loads(log.read_text()) if arguments.append and log.exists() else []
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(json.dumps([*records, record], indent=1) + "\n")
    return run.returncode


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--problems", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, help="threads; as many as there are cores")
    parser.add_argument("--path", metavar="NAME", help="the only one, of those in fuzz_cuda.cc")
    parser.add_argument("--sanitize", metavar="NAME")
    parser.add_argument("--objects", type=Path, metavar="FOLDER", help="a CMake build")
    parser.add_argument("--program", type=Path, help="built before")
    parser.add_argument("--keep", type=Path, metavar="PROGRAM", help="where to leave the program")
    parser.add_argument("--out", type=Path, metavar="LOG.json")
    parser.add_argument("--append", action="store_true", help="to the records in the log")
    return parser.parse_args()


def _build(arguments: argparse.Namespace, folder: Path) -> Path:
    on_cpu = arguments.platform == "cpu"
    cxx = os.environ.get("CXX") or "c++"
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    flags = [*_FLAGS, "-g1"]
    if arguments.sanitize and on_cpu:
        # Unoptimised: the optimiser takes minutes over instrumented vector code.
        flags += [f"-fsanitize={arguments.sanitize}", "-fno-sanitize-recover"]
        level = "-O0"
    else:
        level = "-O2"
    compiler = [cxx, *flags] if on_cpu else [nvcc, "-Xcompiler", ",".join(flags)]
    compiler += ["-std=c++20", f"-I{_ROOT}"]

    ours = [_HERE / "problems.cc", _HERE / f"fuzz_{arguments.platform}.cc"]
    if arguments.objects:
        kernels, objects = [], _objects(arguments.objects, arguments.platform)
    else:
        names = ["cpu/kernel.cc", "cpu/walk_*.cc"] if on_cpu else ["cuda/*.cu", "cuda/launch.cc"]
        kernels, objects = [path for name in names for path in sorted(_ROOT.glob(name))], []

    def compile_one(source: Path) -> Path:
        made = folder / f"{source.name}.o"
        how = ["-O3", "-arch=native"] if source.suffix == ".cu" else [level]
        # UBSan doubles the time to compile; walk_baseline.cc is the same code for other vectors.
        if arguments.sanitize and source.name.startswith("walk_avx"):
            how.append("-fno-sanitize=undefined")
        subprocess.run([*compiler, *how, "-c", str(source), "-o", str(made)], check=True)
        return made

    # The longest first: walk_baseline.cc.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects += pool.map(compile_one, [*reversed(kernels), *ours])
    program = arguments.keep or folder / "fuzz"
    subprocess.run([*compiler, *map(str, objects), "-o", str(program)], check=True)
    return program


def _objects(build: Path, platform: str) -> list[Path]:
    """The kernel's objects in a CMake build of the package."""
    folders = {
        "cpu": [("_cpu.dir/cpu", "kernel.cc"), ("_cpu.dir/cpu", "walk_*.cc")],
        "cuda": [("jax_scan_cuda_kernels.dir/cuda", "*.cu"), ("_cuda.dir/cuda", "launch.cc")],
    }
    found = []
    for folder, name in folders[platform]:
        here = sorted((build / "CMakeFiles" / folder).glob(f"{name}.o"))
        # A build folder may hold objects of sources that are no more.
        here = [made for made in here if (_ROOT / platform / made.stem).exists()]
        if not here:
            sys.exit(f"{build} has no objects of {platform}/{name}")
        found += here
    return found


def _complains(line: str) -> bool:
    marks = ("FAILED", "HANGS", "crashed", "ERROR", "RACECHECK SUMMARY", "runtime error")
    return any(mark in line for mark in marks) or line.startswith("  ")


def _asked(command: list[str]) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def _versions(on_cpu: bool) -> dict[str, str]:
    if on_cpu:
        return {"compiler": _asked([os.environ.get("CXX") or "c++", "--version"]).split("\n")[0]}
    driver = ["nvidia-smi", "--query-gpu=driver_version", _CSV]
    return {
        "compiler": _asked(["nvcc", "--version"]).split("\n")[-1],
        "driver": _asked(driver).split("\n")[0],
    }


def _commit() -> str:
    """What is tested; JAX_SCAN_COMMIT says it where the sources have no history."""
    if commit := os.environ.get("JAX_SCAN_COMMIT"):
        return commit
    git = ["git", "-C", str(_ROOT)]
    changed = _asked([*git, "status", "--porcelain", "--untracked-files=no"])
    return _asked([*git, "rev-parse", "HEAD"]) + (" and changes" if changed else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return f"{platform.machine()}, {' and '.join(sorted(models)) or 'unknown model'}"


if __name__ == "__main__":
    sys.exit(main())
