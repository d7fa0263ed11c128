"""Times the scan against its limit and its peers: `python benchmarks/run.py`.

A row is one problem in one direction. `backward` is the gradient alone, given what the forward pass
has kept. `limit_us` is the fastest elementwise operation that moves the same bytes, `ratio` is
limit_us / ours_us, and peers are timed in the same process. All are compared with double
precision, on the very inputs that are timed: `max_rel_err` is ours, `peer_errors` theirs.
`gb_per_s` is ours, in bytes that have to be moved. Rows of options have `plain_us`, our time
without the option.

On a CPU every problem runs with all cores and with one, each in a process of its own.

The file is written after each problem. A run that was cut short is taken up again with --continue.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch has its share of the same card.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import limits
import peers
import through_jax
import torch_peers
from data import Checker, Data, draw, scan_of
from problems import SETS, Problem
from timing import Timed, backward_chain, compile_all, forward_chain, in_turns, spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SECONDS = 0.25  # for ours and the limits of a row together, and for its peers
_TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-12}
# glibc maps arrays from 32 MB up afresh in each call, unless it is told not to, and page faults are
# then all that one measures.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 29),
}

KEYS = ("case", "shape", "dtype", "direction", "variant", "cores")


def main() -> int:
    arguments = _parse()
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and not _is_set_up(arguments.cores):
        return _on_cores(arguments.cores)
    jax.config.update("jax_enable_x64", True)  # for the float64 rows; others stay what they are
    out = arguments.out or Path(__file__).parent / "results" / f"{_slug(_device())}.json"
    report: dict[str, Any] = {**_header(), "through_jax": [], "rows": []}
    if arguments.resume and out.exists():
        before = json.loads(out.read_text())
        if any(before[key] != report[key] for key in ("commit", "device", "versions")):
            sys.exit(f"{out} is of another commit, device or version: it can't be continued")
        report = before
    out.parent.mkdir(parents=True, exist_ok=True)

    start = time.perf_counter()
    done = {_key(row) for row in report["rows"]}
    for group in _groups(arguments.cases, done):
        for row in _measure(group, arguments.peers):
            _compare_with_plain(row, report["rows"])
            report["rows"].append(row)
            print(f"{time.perf_counter() - start:4.0f} s  {_line(row)}", flush=True)
            out.write_text(_text(report))
        jax.clear_caches()
    if arguments.cases == "gpu" and not on_cpu:
        done = {figure["what"] for figure in report["through_jax"]}
        for figure in through_jax.figures(done):
            report["through_jax"].append(figure)
            print(figure, flush=True)
            out.write_text(_text(report))
    _draw(out)
    wrong = [row for row in report["rows"] if not row["max_rel_err"] <= _tolerance(row)]
    for row in wrong:
        print("WRONG:", *(row.get(key) for key in KEYS), row["max_rel_err"])
    print(f"{len(report['rows'])} rows in {out}, {time.perf_counter() - start:.0f} s")
    return 1 if wrong else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the scan, its limit and its peers.")
    parser.add_argument(
        "--cases",
        default="cpu" if jax.default_backend() == "cpu" else "gpu",
        help=f"comma-separated: sets ({', '.join(SETS)}) or cases of the device's set "
        f"({', '.join(dict.fromkeys(p.case for s in SETS.values() for p in s))})",
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
        found = SETS.get(name) or [p for p in names if p.case == name]
        if not found:
            sys.exit(f"there is no case {name!r}")
        chosen += found
    left = [p for p in chosen if any(_key(_labels(p, d)) not in done for d in p.directions)]
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


# ---- Measuring -----------------------------------------------------------------------------------


def _measure(group: list[Problem], with_peers: bool) -> Iterator[dict[str, Any]]:
    """Compiles the programs of all problems of a group at a time, then runs one by one."""
    if not with_peers:
        group = [problem._replace(peers="") for problem in group]
    if jax.default_backend() == "gpu" and any(problem.peers == "all" for problem in group):
        torch_peers.start_build()
    parts = [_Part(problem) for problem in group]
    traced = {(k, key): t for k, part in enumerate(parts) for key, t in part.traced().items()}
    programs = compile_all(traced)
    for k, part in enumerate(parts):
        yield from part.rows({key: f for (m, key), f in programs.items() if m == k})
        limits.release()


class _Part:
    """The measurement of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.checker = Checker(problem)
        self.calls = _calls(problem)
        self.programs: dict[Any, Callable[..., Any]] = {}

    # Programs are known by: "draw"; (scan, "vjp" | direction); (direction, limit); a sampled
    # array's shape and dtype.

    def traced(self) -> dict[Any, jax.stages.Traced]:
        found: dict[Any, jax.stages.Traced] = {}

        def trace(key: Any, function: Callable[..., Any], *args: Any) -> Any:
            found[key] = jax.jit(function).trace(*args)
            return spec(found[key].out_info)

        data: Data = trace("draw", functools.partial(draw, self.problem))
        for name, scan in self._scans().items():
            # `reset` is no argument of a scan, but it must be one of the program.
            reset, args, cotangent = self._arguments(name, data)
            calls = self._calls_of(name)
            factors = (data.a,) * min(2, calls)
            trace((name, "forward"), _with_reset(scan, calls), reset, factors, *args[1:])
            if "backward" in self.problem.directions:
                _, pull_back = trace((name, "vjp"), _vjp(scan), reset, *args)
                pull_backs = (pull_back,) * min(2, calls)
                trace((name, "backward"), backward_chain(calls), pull_backs, cotangent)
        for direction in self.problem.directions:
            for name, (function, args) in self._limits(direction, data).items():
                trace((direction, name), function, *args)
        arrays: list[Any] = [data.a, data.b]
        if self.problem.variant == "reset":
            shape = data.b.shape[: self.problem.axis + 1]
            arrays.append(jax.ShapeDtypeStruct(shape + (1,) * (data.b.ndim - len(shape)), bool))
        for x in arrays:
            trace((x.shape, x.dtype), self.checker.sample, x)
        return found

    def _limits(self, direction: str, data: Data) -> dict[str, limits.Program]:
        make = limits.forward_programs if direction == "forward" else limits.backward_programs
        return make(data, self.calls)

    def _arguments(self, name: str, data: Data) -> tuple[Any, tuple[jax.Array, ...], Any]:
        """A scan's reset, arguments and cotangent. Peers know no options."""
        if name == "ours":
            return data.reset, data.differentiable, data.cotangent
        return None, (data.a, data.b), data.g

    def _scans(self) -> dict[str, Callable[..., Any]]:
        """By name: (a, b, h0?, reset=) -> h, or h and the state."""
        return {
            "ours": functools.partial(scan_of, self.problem),
            **{
                name: lambda reset, scan=scan: scan
                for name, scan in peers.jax_peers(self.problem).items()
            },
        }

    def _calls_of(self, name: str) -> int:
        """How many calls a chain has; of a peer, whose programs compile slowly, few."""
        return self.calls if name == "ours" else 4 if self.problem.short and self.calls > 10 else 1

    def rows(self, programs: dict[Any, Callable[..., Any]]) -> Iterator[dict[str, Any]]:
        self.programs = programs
        data: Data = jax.block_until_ready(programs["draw"]())
        self.checker.expect(data, self._taken)
        host = peers.host_peers(self.problem, data)
        for direction in self.problem.directions:
            yield self._row(direction, data, host[direction])

    def _row(self, direction: str, data: Data, host: dict[str, Any]) -> dict[str, Any]:
        calls = self.calls
        found: dict[str, Timed] = {}
        slow: dict[str, Timed] = {}
        others: dict[str, float] = {}
        errors: dict[str, float] = {}
        for name in self._scans():
            timed, errors[name] = self._jax_timed(name, direction, data)
            (found if name == "ours" else slow)[name] = timed
        for name, peer in host.items():
            slow[name] = Timed(peer, wait=lambda _: None)
            errors[name] = self.checker.error(self._taken, **peer())

        xla = {
            name: Timed(functools.partial(self.programs[direction, name], *args), calls)
            for name, (_, args) in self._limits(direction, data).items()
        }
        if jax.default_backend() == "cpu":
            # The limit is what C++ can do; XLA's call is a peer.
            found["XLA elementwise"] = next(iter(xla.values()))
            with limits.triads(self.problem, direction, calls) as triads:
                us = in_turns(found | triads, _SECONDS)
            others["XLA elementwise"] = us.pop("XLA elementwise")
        else:
            if direction == "forward" and (timed := limits.torch_add(self.problem, calls)):
                xla["torch.add"] = timed
            us = in_turns(found | xla, _SECONDS)
        ours = us.pop("ours")
        best = min(us, key=lambda name: us[name])
        others |= in_turns(slow, _SECONDS) if slow else {}
        if jax.default_backend() == "gpu" and self.problem.peers == "all":
            for name, timed, values in torch_peers.measurements(self.problem, data, direction):
                others |= in_turns({name: timed}, _SECONDS / 2)
                arrays = {what: jax.dlpack.from_dlpack(x) for what, x in values.items()}
                errors[name] = self.checker.error(self._taken, **arrays)
        moved = self.problem.moved_bytes(direction)
        return {
            **_labels(self.problem, direction),
            "ours_us": _rounded(ours),
            "limit_us": _rounded(us[best]),
            "ratio": _rounded(us[best] / ours),
            "goal": self.problem.goal(direction),
            "gb_per_s": _rounded(moved / ours / 1e3),
            "peers": {name: _rounded(time) for name, time in others.items()},
            "max_rel_err": errors.pop("ours"),
            "peer_errors": errors,
            "limit": best,
        }

    def _jax_timed(self, name: str, direction: str, data: Data) -> tuple[Timed, float]:
        """One scan's chain, and the largest error of its first call."""
        reset, args, cotangent = self._arguments(name, data)
        calls = self._calls_of(name)
        factors = (data.a, -data.a)[: min(2, calls)]
        got: dict[str, Any]
        if direction == "forward":
            start = functools.partial(self.programs[name, "forward"], reset, factors, *args[1:])
            h = start()[0]
            got = dict(zip(("h", "state"), h if isinstance(h, tuple) else (h,), strict=False))
        else:
            vjp = self.programs[name, "vjp"]
            pull_backs = tuple(vjp(reset, a, *args[1:])[1] for a in factors)
            start = functools.partial(self.programs[name, "backward"], pull_backs, cotangent)
            got = dict(zip(("da", "db", "dh0"), start()[0], strict=False))
        return Timed(start, calls), self.checker.error(self._taken, **got)

    def _taken(self, x: jax.Array) -> jax.Array:
        program = self.programs.get((x.shape, x.dtype))
        return program(x) if program else self.checker.sample(x)


def _calls(problem: Problem) -> int:
    """The length of chains: a millisecond on a GPU, except where a call takes longer."""
    if jax.default_backend() == "cpu":
        return 10 if problem.short else 1
    if problem.short:
        return 100
    return max(1, min(10, (1 << 30) // problem.array_bytes()[1]))


def _with_reset(scan: Callable[..., Any], calls: int) -> Callable[..., Any]:
    return lambda reset, factors, *args: forward_chain(scan(reset), calls)(factors, *args)


def _vjp(scan: Callable[..., Any]) -> Callable[..., Any]:
    return lambda reset, *args: jax.vjp(scan(reset), *args)


# ---- The file ------------------------------------------------------------------------------------


def _labels(problem: Problem, direction: str) -> dict[str, Any]:
    labels = problem.labels(direction)
    if jax.default_backend() == "cpu":
        labels["cores"] = len(os.sched_getaffinity(0))
    return labels


def _key(row: dict[str, Any]) -> str:
    return json.dumps([row.get(key) for key in KEYS])


def _compare_with_plain(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """To a row of an option adds our time without it, if that was measured."""
    if row["case"] != "options":
        return
    same = ("shape", "dtype", "direction", "cores")
    for other in rows:
        if other["variant"] == "plain" and all(other.get(k) == row.get(k) for k in same):
            row["plain_us"] = other["ours_us"]


def _tolerance(row: dict[str, Any]) -> float:
    return _TOLERANCE.get(row["dtype"].split()[-1], 1e-5)


def _header() -> dict[str, Any]:
    names = ("jax_scan", "jax", "jaxlib", "torch", "triton", "numpy", "numba")
    versions = {"python": platform.python_version()}
    for name in (*names, "accelerated-scan", "fla-core"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    on_gpu = (
        "chains of up to 10 calls, of 100 where a launch would be measured, in one XLA program, "
        "which is a CUDA graph; queued programs of ours and of the limits take turns; medians. The "
        "limit is the fastest of XLA's a b + 1 and a + b and torch.add forward, of an XLA program "
        "that reads and writes as much backward. JAX's peers: queued programs of one call, of 4 "
        "where short. Others: CUDA graphs; accelerated-scan in its own layout (B, D, L), FLA with "
        "log a given"
    )
    on_cpu = (
        "single calls (chains of 10 where in cache) of ours and of the limits by turns; medians; "
        "malloc keeps its memory. The limit is the fastest C++ loop that reads and writes as much, "
        "on one or all cores, with or without streaming stores"
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "device": _device(),
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


def _device() -> str:
    kind = jax.devices()[0].device_kind
    return "cpu" if kind == "cpu" else kind


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return f"{platform.machine()}, {' and '.join(sorted(models)) or 'unknown model'}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _text(report: dict[str, Any]) -> str:
    """JSON with a line for each row and figure."""
    listed = ("through_jax", "rows")
    head = json.dumps({k: v for k, v in report.items() if k not in listed}, indent=1)
    parts = [head.removesuffix("\n}")]
    for name in listed:
        lines = ",\n".join(f"  {json.dumps(entry)}" for entry in report[name])
        parts.append(f' "{name}": [\n{lines}\n ]')
    return ",\n".join(parts) + "\n}\n"


def _line(row: dict[str, Any]) -> str:
    short = f"  SHORT of {row['goal']}" if row["ratio"] < row["goal"] else ""
    if "plain_us" in row:
        short = f"  plain / this {row['plain_us'] / row['ours_us']:.3f}"
    # Peers may be less exact than ours.
    bound = 10 * _tolerance(row)
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


def _draw(out: Path) -> None:
    if importlib.util.find_spec("matplotlib"):
        import plot

        plot.draw(out)


def _rounded(x: float) -> float:
    return float(f"{x:.4g}")


if __name__ == "__main__":
    sys.exit(main())
