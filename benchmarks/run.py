"""Times the scan against its limit and its peers: `python benchmarks/run.py`.

A row is one problem in one direction. `backward` is the gradient alone, given what the forward pass
has kept. `limit_us` is the fastest elementwise operation that moves the same bytes, `ratio` is
limit_us / ours_us, and the peers are timed as ours is, in the same process. Each row's values are
checked against double precision, on the very inputs that were timed.

The file is written after each problem. A run that was cut short is taken up again with --continue.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import exact
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from problems import SETS, Problem

import jax_scan
from jax_scan._measure import microseconds, three_in_two_out, two_in_one_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How many calls one program holds, each with the last one's result as input. Values stay finite.
_CHAIN = 10
_CHAIN_OF_SHORT = 20
_TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-12}
# lax.scan launches kernels at each step; beyond this its rows would take the most of the time.
_LAX_SCAN_MAX = 4096

KEYS = ("case", "shape", "dtype", "direction", "variant")


class Data(NamedTuple):
    """A problem's arrays. g and gstate are the cotangents of h and the state."""

    a: jax.Array
    b: jax.Array
    g: jax.Array
    h0: jax.Array | None
    reset: jax.Array | None
    gstate: jax.Array | None

    @property
    def differentiable(self) -> tuple[jax.Array, ...]:
        return (self.a, self.b) if self.h0 is None else (self.a, self.b, self.h0)


def main() -> int:
    arguments = _parse()
    jax.config.update("jax_enable_x64", True)  # for the float64 rows; others stay what they are
    out = arguments.out or Path(__file__).parent / "results" / f"{_slug(_device())}.json"
    header = _header()
    rows: list[dict[str, Any]] = []
    if arguments.resume and out.exists():
        before = json.loads(out.read_text())
        if any(before[key] != header[key] for key in ("commit", "device", "versions")):
            sys.exit(f"{out} is of another commit, device or version: it can't be continued")
        rows = before["rows"]
    done = {_key(row) for row in rows}

    wrong = []
    for problem in _chosen(arguments.cases):
        if all(_key(_labels(problem, d)) in done for d in ("forward", "backward")):
            continue
        for row in _measure(problem, arguments.peers):
            rows.append(row)
            print(_line(row, problem), flush=True)
            if row["max_rel_err"] > _TOLERANCE.get(problem.dtype, 1e-5):
                wrong.append(row)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(_text(header, rows))
        jax.clear_caches()
    for row in wrong:
        print("WRONG:", *(row[key] for key in KEYS), row["max_rel_err"])
    print(f"{len(rows)} rows in {out}")
    return 1 if wrong else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the scan, its limit and its peers.")
    parser.add_argument(
        "--cases",
        default="cpu" if jax.default_backend() == "cpu" else "gpu",
        help=f"comma-separated: sets ({', '.join(SETS)}) or cases of the gpu set "
        f"({', '.join(dict.fromkeys(p.case for p in SETS['gpu']))})",
    )
    parser.add_argument(
        "--out", "--json", type=Path, help="default: benchmarks/results/<device>.json"
    )
    parser.add_argument("--continue", dest="resume", action="store_true", help="keep rows in --out")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    return parser.parse_args()


def _chosen(cases: str) -> Iterator[Problem]:
    for name in cases.split(","):
        found = SETS.get(name) or [p for p in SETS["gpu"] if p.case == name]
        if not found:
            sys.exit(f"there is no case {name!r}")
        yield from found


# ---- One problem ---------------------------------------------------------------------------------


def _measure(problem: Problem, with_peers: bool) -> Iterator[dict[str, Any]]:
    data = _data(problem)
    scan = functools.partial(
        jax_scan.linear_scan,
        axis=problem.axis,
        reverse=problem.variant == "reverse",
        return_state=problem.variant == "return_state",
        out_dtype=problem.dtype,
    )
    if data.reset is not None:
        scan = functools.partial(scan, reset=data.reset)
    errors = _errors(problem, data, scan)
    peers = _peers(problem) if with_peers else {}

    def row(direction: str, ours: float, limits: list[float], others: dict) -> dict[str, Any]:
        limit = min(limits)
        return {
            **_labels(problem, direction),
            "ours_us": _rounded(ours),
            "limit_us": _rounded(limit),
            "ratio": _rounded(limit / ours),
            "peers": {name: _rounded(us) for name, us in others.items()},
            "max_rel_err": float(f"{errors[direction]:.3g}"),
        }

    yield row(
        "forward",
        _forward_us(problem, scan, *data.differentiable),
        _forward_limits(problem, data),
        _timed(peers, lambda peer: _forward_us(problem, peer, data.a, data.b, peer=True)),
    )
    cotangent = data.g if data.gstate is None else (data.g, data.gstate)
    yield row(
        "backward",
        _backward_us(problem, scan, data.differentiable, cotangent),
        _backward_limits(problem, data),
        _timed(peers, lambda f: _backward_us(problem, f, (data.a, data.b), data.g, peer=True)),
    )


def _timed(
    peers: dict[str, Callable[..., Any]], time_of: Callable[[Any], float]
) -> dict[str, float]:
    found = {}
    for name, peer in peers.items():
        try:
            found[name] = time_of(peer)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(f"{name} needs more memory than there is")
    return found


def _data(problem: Problem) -> Data:
    """Random factors of modulus 0.6 to 1, everything else normal."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(shape: tuple[int, ...], dtype: str) -> jax.Array:
        if dtype == "complex64":
            return lax.complex(*(normal(shape, "float32") for _ in range(2)))
        return jax.random.normal(next(keys), shape, dtype)

    rank, axis = len(problem.shape), problem.axis
    a_shape = problem.a_shape or problem.shape
    a_shape = (1,) * (rank - len(a_shape)) + a_shape
    a_dtype = problem.a_dtype or problem.dtype
    real = "float32" if a_dtype == "complex64" else a_dtype
    a = jax.random.uniform(next(keys), a_shape, real, 0.6, 1)
    if a_dtype == "complex64":
        a = a * jnp.exp(1j * jax.random.uniform(next(keys), a_shape, real, -3, 3))
    step = (*problem.shape[:axis], *problem.shape[axis + 1 :])
    state = "float32" if problem.dtype in ("bfloat16", "float16") else problem.dtype
    data = Data(
        a.astype(a_dtype),
        normal(problem.shape, problem.dtype),
        normal(problem.shape, problem.dtype),
        normal(step, state) if problem.variant == "h0" else None,
        jax.random.bernoulli(next(keys), 0.01, problem.shape[: axis + 1])
        if problem.variant == "reset"
        else None,
        normal(step, state) if problem.variant == "return_state" else None,
    )
    return jax.block_until_ready(data)


def _forward_us(
    problem: Problem, scan: Callable[..., Any], *args: jax.Array, peer: bool = False
) -> float:
    def chained(count: int, a: jax.Array, b: jax.Array, *rest: jax.Array) -> jax.Array:
        for _ in range(count):
            out = lax.optimization_barrier(scan(a, b, *rest))
            b = out[0] if isinstance(out, tuple) else out
        return b

    return _time(problem, scan, chained, *args, peer=peer)


def _backward_us(
    problem: Problem,
    scan: Callable[..., Any],
    args: tuple[jax.Array, ...],
    cotangent: Any,
    *,
    peer: bool = False,
) -> float:
    # What the forward pass has kept is in pull_back, whose arrays are arguments of the timed call.
    _, pull_back = jax.jit(lambda *args: jax.vjp(scan, *args))(*args)

    def apply(pull_back: Any, g: Any) -> Any:
        return pull_back(g)

    def chained(count: int, pull_back: Any, g: Any) -> Any:
        found = []
        for _ in range(count):
            da, db, *rest = lax.optimization_barrier(pull_back(g))
            found.append((da, rest))
            g = (db, g[1]) if isinstance(g, tuple) else db
        return found, g

    return _time(problem, apply, chained, pull_back, cotangent, peer=peer)


def _time(
    problem: Problem,
    once: Callable[..., Any],
    chained: Callable[..., Any],
    *args: Any,
    peer: bool = False,
) -> float:
    """The time of one call; on a GPU of one in a chain, except for peers, which compile slowly."""
    if jax.default_backend() == "cpu" or (peer and not problem.graph):
        return microseconds(jax.jit(once), *args)
    count = _count(problem)
    return microseconds(jax.jit(functools.partial(chained, count)), *args) / count


def _count(problem: Problem) -> int:
    return _CHAIN_OF_SHORT if problem.graph else _CHAIN


# ---- Limits and peers ----------------------------------------------------------------------------


def _forward_limits(problem: Problem, data: Data) -> list[float]:
    def add(a: jax.Array, b: jax.Array) -> jax.Array:
        return (a + b).astype(b.dtype)

    found = [_forward_us(problem, f, data.a, data.b) for f in (two_in_one_out, add)]
    torch_us = _torch_add(problem)
    return found if torch_us is None else [*found, torch_us]


def _backward_limits(problem: Problem, data: Data) -> list[float]:
    """Three arrays in and two out; with a broadcast `a`, whose gradient is small, two and one."""
    if data.a.shape != data.b.shape:

        def one_out(h: jax.Array, g: jax.Array, a: jax.Array) -> jax.Array:
            return (h * g + a).astype(g.dtype)

        return [_forward_us(problem, one_out, data.b, data.g, data.a)]

    def chained(
        count: int, a: jax.Array, h: jax.Array, g: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        for _ in range(count):
            h, g = lax.optimization_barrier(three_in_two_out(a, h, g))
        return h, g

    return [_time(problem, three_in_two_out, chained, data.a, data.b, data.g)]


def _torch_add(problem: Problem) -> float | None:
    """torch.add with the same bytes; None where torch or its CUDA is missing, or a is broadcast."""
    if jax.default_backend() != "gpu" or problem.a_shape or problem.a_dtype:
        return None
    try:
        import torch
    except ModuleNotFoundError:
        return None
    if not torch.cuda.is_available():
        return None
    dtype = getattr(torch, problem.dtype)
    x, y, out = (torch.rand(problem.shape, device="cuda").to(dtype) for _ in range(3))
    count = _count(problem)
    torch.add(x, y, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            torch.add(x, y, out=out)
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / (5 * count))
    return float(np.median(times[5:])) * 1e6


def _peers(problem: Problem) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """What else computes h from a and b. None has the options."""
    if problem.variant != "plain" or problem.case == "length":
        return {}
    axis = problem.axis

    def associative_scan(a: jax.Array, b: jax.Array) -> jax.Array:
        def compose(first: Any, then: Any) -> Any:
            return then[0] * first[0], then[0] * first[1] + then[1]

        a = jnp.broadcast_to(a, b.shape).astype(b.dtype)
        return lax.associative_scan(compose, (a, b), axis=axis)[1]

    def scan(a: jax.Array, b: jax.Array) -> jax.Array:
        def step(h: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            h = now[0] * h + now[1]
            return h, h

        a = jnp.broadcast_to(a, b.shape).astype(b.dtype)
        time_first = jnp.moveaxis(a, axis, 0), jnp.moveaxis(b, axis, 0)
        h = lax.scan(step, jnp.zeros_like(time_first[1][0]), time_first)[1]
        return jnp.moveaxis(h, 0, axis)

    found = {"lax.associative_scan": associative_scan}
    if problem.length <= _LAX_SCAN_MAX and not problem.graph:
        found["lax.scan"] = scan
    return found


# ---- Correctness ---------------------------------------------------------------------------------


def _errors(problem: Problem, data: Data, scan: Callable[..., Any]) -> dict[str, float]:
    """The largest difference from double precision, relative to the largest value.

    Of every element, or where there are many of all times of some channels: with their whole group
    of channels that share a factor.
    """
    cotangent = data.g if data.gstate is None else (data.g, data.gstate)
    h, pull_back = jax.jit(lambda *args: jax.vjp(scan, *args))(*data.differentiable)
    gradients = jax.jit(lambda pull_back, g: pull_back(g))(pull_back, cotangent)
    state = None
    if data.gstate is not None:
        h, state = h
    axis = problem.axis
    chosen = _sample(problem, data.a.shape)

    def host(x: jax.Array | None, lift: bool = False) -> Any:
        """The sample of it in double precision, with time first and in the order of the scan."""
        if x is None:
            return None
        x = jnp.expand_dims(x, axis) if lift else x
        for k, index in chosen.items():
            if k < x.ndim and x.shape[k] > 1:
                x = jnp.take(x, index, axis=k)
        y = np.moveaxis(np.asarray(x), axis, 0)
        if problem.variant == "reverse":
            y = y[::-1]
        return y if y.dtype == bool else y.astype(np.result_type(y.dtype, np.float64))

    b = host(data.b)
    a = np.broadcast_to(host(data.a), b.shape)
    reset = host(data.reset)
    if reset is not None:
        reset = np.broadcast_to(reset.reshape(*reset.shape, *(1,) * (b.ndim - reset.ndim)), b.shape)
    first = [None if x is None else host(x, lift=True)[0] for x in (data.h0, data.gstate)]
    want = exact.value_and_gradients(a, b, host(data.g), first[0], reset, first[1])
    da = host(gradients[0])
    summed = tuple(k for k, n in enumerate(da.shape) if n < b.shape[k])
    got = {"da": da, "db": host(gradients[1])}
    if data.h0 is not None:
        got["dh0"] = host(gradients[2], lift=True)[0]
    want["da"] = want["da"].sum(summed, keepdims=True)
    forward = [_error(host(h), want["h"])]
    if state is not None:
        forward.append(_error(host(state, lift=True)[0], want["h"][-1]))
    return {
        "forward": max(forward),
        "backward": max(_error(x, want[name]) for name, x in got.items()),
    }


def _sample(problem: Problem, a_shape: tuple[int, ...]) -> dict[int, np.ndarray]:
    """For each axis that is sampled the indices to look at; 128 channels or all."""
    if np.prod(problem.shape) <= 1 << 21:
        return {}
    rng = np.random.default_rng(0)
    chosen, left = {}, 128
    for k in reversed(range(len(problem.shape))):
        if k != problem.axis and a_shape[k] == problem.shape[k]:
            size = min(problem.shape[k], left if k == 0 else max(1, left // 2))
            chosen[k] = np.sort(rng.choice(problem.shape[k], size, replace=False))
            left = max(1, left // size)
    return chosen


def _error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.nan_to_num(np.max(np.abs(got - want)) / np.max(np.abs(want)), nan=np.inf))


# ---- The file ------------------------------------------------------------------------------------


def _labels(problem: Problem, direction: str) -> dict[str, Any]:
    dtype = problem.dtype
    if problem.a_dtype:
        dtype = f"a {problem.a_dtype}, b {dtype}"
    variant = problem.variant
    if problem.a_shape:
        variant = f"a {'x'.join(map(str, problem.a_shape))}"
    elif problem.axis == len(problem.shape) - 1:
        variant = "time last"
    return {
        "case": problem.case,
        "shape": list(problem.shape),
        "dtype": dtype,
        "direction": direction,
        "variant": variant,
    }


def _key(row: dict[str, Any]) -> str:
    return json.dumps([row[key] for key in KEYS])


def _header() -> dict[str, Any]:
    names = ("jax_scan", "jax", "jaxlib", "torch", "numpy")
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "device": _device(),
        "versions": versions,
        "method": "median over batches of queued programs; a program holds a chain of "
        f"{_CHAIN} calls ({_CHAIN_OF_SHORT} where launches count), but one call of a peer; on a "
        "CPU every call is timed alone",
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
    return f"{commit} with changes" if changed else commit


def _device() -> str:
    kind = jax.devices()[0].device_kind
    return f"{platform.machine()} cpu" if kind == "cpu" else kind


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _text(header: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """JSON with a line for each row."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = json.dumps(header, indent=1).removesuffix("\n}")
    return f'{head},\n "rows": [\n{lines}\n ]\n}}\n'


def _line(row: dict[str, Any], problem: Problem) -> str:
    goal = problem.goals[row["direction"] == "backward"]
    short = f"  short of {goal}" if row["ratio"] < goal else ""
    peers = " ".join(f"{name} {us:g}" for name, us in row["peers"].items())
    shape = "x".join(map(str, row["shape"]))
    return (
        f"{row['case']:24} {shape:16} {row['dtype']:12} {row['variant']:12} {row['direction']:8} "
        f"ours {row['ours_us']:9g} us  limit {row['limit_us']:9g}  ratio {row['ratio']:6g}  "
        f"err {row['max_rel_err']:.1e}  {peers}{short}"
    )


def _rounded(x: float) -> float:
    return float(f"{x:.4g}")


if __name__ == "__main__":
    sys.exit(main())
