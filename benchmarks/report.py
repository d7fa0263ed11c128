"""The file of results, and what is printed of it."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from problems import Problem

_TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-12}
_KEYS = ("case", "shape", "dtype", "direction", "variant", "cores")


def rounded(x: float) -> float:
    return float(f"{x:.4g}")


def labels(problem: Problem, direction: str) -> dict[str, Any]:
    labels = problem.labels(direction)
    if jax.default_backend() == "cpu":
        labels["cores"] = len(os.sched_getaffinity(0))
    return labels


def key(row: dict[str, Any]) -> str:
    return json.dumps([row.get(key) for key in _KEYS])


def compare_with_plain(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """To a row of an option adds our time without it, if that was measured."""
    if row["case"] != "options":
        return
    same = ("shape", "dtype", "direction", "cores")
    for other in rows:
        if other["variant"] == "plain" and all(other.get(k) == row.get(k) for k in same):
            row["plain_us"] = other["ours_us"]


def tolerance(row: dict[str, Any]) -> float:
    return _TOLERANCE.get(row["dtype"].split()[-1], 1e-5)


def header() -> dict[str, Any]:
    names = ("jax_scan", "jax", "jaxlib", "torch", "triton", "numpy", "numba")
    versions = {"python": platform.python_version()}
    for name in (*names, "accelerated-scan", "fla-core"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    on_gpu = (
        "ours: chains of up to 10 calls, of 100 where a launch would be measured, in one XLA "
        "program, which is a CUDA graph; programs are queued; ours and the limits take turns; "
        "medians. The limit is the fastest of XLA's a b + 1 and a + b, torch.add and plain CUDA "
        "kernels forward, of an XLA program and CUDA kernels backward. JAX's peers: queued "
        "programs of one call, with a loop of 10 where a launch would be measured. Other peers: "
        "CUDA graphs; accelerated-scan in its own layout (B, D, L), FLA with log a given"
    )
    on_cpu = (
        "single calls (chains of 100 where in cache) of ours, of XLA's a b + 1 and of the limits "
        "by turns; medians; malloc keeps its memory. The limit is the fastest C++ loop that reads "
        "and writes as much, on one or all cores, with or without streaming stores"
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "device": device(),
        "processor": _processor(),
        "versions": versions,
        "method": on_cpu if jax.default_backend() == "cpu" else on_gpu,
    }


def _commit() -> str:
    """The commit that is measured; JAX_SCAN_COMMIT says it where the sources have no history."""
    if commit := os.environ.get("JAX_SCAN_COMMIT"):
        return commit
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
        commit = run([*git, "rev-parse", "HEAD"]).stdout.strip()
        changed = run([*git, "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    changed = [line for line in changed.splitlines() if "benchmarks/results/" not in line]
    return f"{commit} with changes" if changed else commit


def device() -> str:
    kind = jax.devices()[0].device_kind
    return "cpu" if kind == "cpu" else kind


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return f"{platform.machine()}, {' and '.join(sorted(models)) or 'unknown model'}"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def text(report: dict[str, Any]) -> str:
    """JSON with a line for each entry of a list."""
    listed = [key for key, value in report.items() if isinstance(value, list)]
    head = json.dumps({k: v for k, v in report.items() if k not in listed}, indent=1)
    parts = [head.removesuffix("\n}")]
    for name in listed:
        lines = ",\n".join(f"  {json.dumps(entry)}" for entry in report[name])
        parts.append(f' "{name}": [\n{lines}\n ]' if lines else f' "{name}": []')
    return ",\n".join(parts) + "\n}\n"


def line(row: dict[str, Any]) -> str:
    short = f"  SHORT of {row['goal']}" if row["ratio"] < row["goal"] else ""
    if "plain_us" in row:
        short = f"  plain / this {row['plain_us'] / row['ours_us']:.3f}"
    # Peers may be less exact than ours.
    bound = 10 * tolerance(row)
    wrong = [name for name, error in row["peer_errors"].items() if not error <= bound]
    found = " ".join(
        f"{name} {us:g}{' (WRONG)' if name in wrong else ''}" for name, us in row["peers"].items()
    )
    shape = "x".join(map(str, row["shape"]))
    cores = f"{row['cores']} cores  " if "cores" in row else ""
    return (
        f"{row['case']:14} {shape:13} {row['dtype']:10} {row['variant']:10} {row['direction']:8} "
        f"{cores}ours {row['ours_us']:g} us  limit {row['limit_us']:g}  ratio {row['ratio']:g}  "
        f"err {row['max_rel_err']:.1e}  {found}{short}"
    )


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong or falls short of its goal."""
    found = []
    for row in rows:
        if not row["max_rel_err"] <= tolerance(row):
            found.append(f"WRONG: {_name(row)}: error {row['max_rel_err']}")
        if row["ratio"] < row["goal"]:
            found.append(f"short: {_name(row)}: {row['ratio']} of the limit, goal {row['goal']}")
        for name in ("lax.scan", "lax.associative_scan"):
            if row["peers"].get(name, row["ours_us"]) < row["ours_us"]:
                found.append(f"short: {_name(row)}: {name} is faster")
        if row.get("plain_us", row["ours_us"]) < 0.97 * row["ours_us"]:
            slower = row["ours_us"] / row["plain_us"] - 1
            found.append(f"short: {_name(row)}: {slower:.0%} slower than without")
    by_length = [row for row in rows if row["case"] == "length"]
    by_length.sort(key=lambda row: max(row["shape"]))
    for row, then in itertools.pairwise(by_length):
        if then["gb_per_s"] < 0.97 * row["gb_per_s"]:
            speeds = f"{then['gb_per_s']} GB/s after {row['gb_per_s']}"
            found.append(f"short: {_name(then)}: {speeds} at the length before")
    for row in rows:
        alone = [r for r in rows if _name(r | {"cores": 1}) == _name(row | {"cores": 1})]
        if row.get("cores", 1) > 1 and len(alone) > 1:
            times = max(r["ours_us"] for r in alone if r["cores"] == 1) / row["ours_us"]
            found.append(f"{_name(row)}: {times:.2f} times as fast as with one")
    return found


def _name(row: dict[str, Any]) -> str:
    return " ".join(
        "x".join(map(str, row[key]))
        if key == "shape"
        else f"{row[key]} cores"
        if key == "cores"
        else row[key]
        for key in _KEYS
        if key in row
    )
