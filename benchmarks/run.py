"""Times the scan against its limit and its peers: `python benchmarks/run.py`.

A row is one problem in one direction. `backward` is the gradient alone, given what the forward pass
has kept. `limit_us` is the fastest elementwise operation that moves the same bytes, `ratio` is
limit_us / ours_us, and peers are timed in the same process. All are compared with double
precision, on the very inputs that are timed: `max_rel_err` is ours, `peer_errors` theirs.
`gb_per_s` is ours, in bytes that have to be moved. Rows of options have `plain_us`, our time
without the option.

On a CPU every problem runs with all cores and with one, each in a process of its own.

The file is written after each problem. A run that was cut short is taken up again with --continue.

Peers of other packages take part where they are installed: torch, accelerated-scan (its CUDA
kernels, which take a minute to compile, with JAX_SCAN_BENCHMARK_WARP=1), fla-core, numba.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch has its share of the same card.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import report
import through_jax
from measure import measure
from problems import SETS, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

_THROUGH_JAX = "through JAX"
# glibc maps arrays from 32 MB up afresh in each call, unless it is told not to, and page faults are
# then all that one measures.
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 29),
}


def main() -> int:
    arguments = _parse()
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and not _is_set_up(arguments.cores):
        return _on_cores(arguments.cores)
    jax.config.update("jax_enable_x64", True)  # for the float64 rows; others stay what they are
    name = report.slug(report.device())
    out = arguments.out or Path(__file__).parent / "results" / f"{name}.json"
    results: dict[str, Any] = {**report.header(), "through_jax": [], "rows": []}
    if arguments.resume and out.exists():
        before = json.loads(out.read_text())
        if any(before[key] != results[key] for key in ("commit", "device", "versions")):
            sys.exit(f"{out} is of another commit, device or version: it can't be continued")
        results = before
    rows = results["rows"]
    out.parent.mkdir(parents=True, exist_ok=True)

    start = time.perf_counter()
    # First: calls of the adapter are bound by the host, and take twice as long in a process that
    # has compiled and run a hundred rows.
    if {"gpu", _THROUGH_JAX} & set(arguments.cases.split(",")) and not on_cpu:
        known = {figure["what"] for figure in results["through_jax"]}
        for figure in through_jax.figures(known):
            results["through_jax"].append(figure)
            print(figure, flush=True)
            out.write_text(report.text(results))
    done = {report.key(row) for row in rows}
    for group in _groups(arguments.cases, done):
        for row in measure(group, arguments.peers):
            report.compare_with_plain(row, rows)
            rows.append(row)
            print(f"{time.perf_counter() - start:4.0f} s  {report.line(row)}", flush=True)
            out.write_text(report.text(results))
        jax.clear_caches()
    if importlib.util.find_spec("matplotlib"):
        import plot

        plot.draw(out)
    found = report.summary(rows)
    print(*found, f"{len(rows)} rows in {out}, {time.perf_counter() - start:.0f} s", sep="\n")
    return 1 if any(line.startswith("WRONG") for line in found) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the scan, its limit and its peers.")
    parser.add_argument(
        "--cases",
        default="cpu" if jax.default_backend() == "cpu" else "gpu",
        help=f"comma-separated: sets ({', '.join(SETS)}), or cases of the device's set "
        f"({', '.join(dict.fromkeys(p.case for s in SETS.values() for p in s))}), or on a GPU "
        f"'{_THROUGH_JAX}', which the set gpu includes",
    )
    parser.add_argument(
        "--out", "--json", type=Path, help="default: benchmarks/results/<device>.json"
    )
    parser.add_argument("--continue", dest="resume", action="store_true", help="keep rows in --out")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--cores", type=int, help="on a CPU: with so many cores only")
    return parser.parse_args()


def _groups(cases: str, done: set[str]) -> Iterator[list[Problem]]:
    """The problems to be run, in groups that are compiled together."""
    names = SETS["cpu" if jax.default_backend() == "cpu" else "gpu"]
    chosen: list[Problem] = []
    for name in cases.split(","):
        if name == _THROUGH_JAX:
            continue
        found = SETS.get(name) or [p for p in names if p.case == name]
        if not found:
            sys.exit(f"there is no case {name!r}")
        chosen += found
    left = [
        p for p in chosen if any(report.key(report.labels(p, d)) not in done for d in p.directions)
    ]
    for case in dict.fromkeys(p.case for p in left):
        yield [p for p in left if p.case == case]


# ---- A CPU's cores -------------------------------------------------------------------------------


def _is_set_up(cores: int | None) -> bool:
    return len(os.sched_getaffinity(0)) == cores and all(k in os.environ for k in _MALLOC)


def _on_cores(cores: int | None) -> int:
    """Runs this program again, with all cores and then with one, or with `cores`."""
    here = sorted(os.sched_getaffinity(0))
    status = 0
    for count in [cores] if cores else sorted({1, len(here)}, reverse=True):
        more = [] if cores or count == len(here) else ["--continue"]
        command = [sys.executable, *sys.argv, *more, *([] if cores else ["--cores", str(count)])]
        os.sched_setaffinity(0, here[:count])
        status |= subprocess.run(command, env=os.environ | _MALLOC, check=False).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
