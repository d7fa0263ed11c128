"""How exact the scan and its gradients are: `python benchmarks/numerics.py`.

Ours, a loop from step to step and `lax.associative_scan`, all with a state of the same dtype and
with results stored in the same dtype, against the loop in double precision on the same numbers. The
loops are `lax.scan`; they and `lax.associative_scan` run on the CPU, whatever device ours runs on.
Their gradients walk back over the stored h: u[t] = g[t] + a[t+1] u[t+1], db[t] = u[t],
da[t] = u[t] h[t-1].

b and g are normally distributed. `decay` is the factor of every step, with a random phase where
the dtype is complex; "0.9998 to 1" is uniform between these, of "random sign" factors the modulus
is uniform between 0.9 and 1, and "turn" is a decay of 0.9999 with the same phase at every step.
Rows of 16 bits have b, h and g of that dtype and a of float32, as 0.9999 would be 1.

`worst` is the largest error of an element relative to the largest value so far:

    |x[t] - exact[t]| / scale[t],  scale[t] = max of |exact| over the steps up to t

in the order in which x is computed, and for da[t] the product of the scales of u[t] and h[t-1].
`norm` is the 2-norm of a channel's errors over that of its values, of the worst channel. `ratio`
and `ratio_of_norms` are ours over the loop's, or over one rounding of the dtype if that is more.
Where one of them is above 2, `rounded_loop` says whether ours are the bits of a loop that rounds
each product and each sum: XLA's fuses them. Elements whose scale is above a quarter of the dtype's
largest number are left out. `overflow` has the step at which the first channel becomes infinite
with ours and with the loop, for h.

With `--plot FILES` draws docs/numerics.svg of such results and fills docs/numerics.md's table.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share a GPU

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax import lax

from jax_scan import linear_scan

DECAYS = (0, 0.5, 0.99, 0.9999, 1, 1.0001, "0.9998 to 1", "random sign", "turn")
DTYPES = ("float32", "bfloat16", "float16", "complex64")
LENGTHS = tuple(10**k for k in range(2, 8))
_HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "complex64": 2.0**-24}


# ---- The scans, time first -----------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="dtype")
def _loop(a: jax.Array, b: jax.Array, dtype: str) -> jax.Array:
    """h[t] = a[t] h[t-1] + b[t] from step to step in a's dtype, stored in `dtype`."""

    def step(h: jax.Array, now: Any) -> Any:
        h = now[0] * h + now[1].astype(h.dtype)
        return h, h.astype(dtype)

    return lax.scan(step, jnp.zeros(b.shape[1:], a.dtype), (a, b), unroll=8)[1]


@functools.partial(jax.jit, static_argnames="dtype")
def _loop_gradients(a: jax.Array, h: jax.Array, g: jax.Array, dtype: str) -> Any:
    """(da, db): u[t] = g[t] + v[t+1], v[t] = a[t] u[t], da[t] = u[t] h[t-1]."""

    def step(v: jax.Array, now: Any) -> Any:
        a, before, g = now
        u = g.astype(v.dtype) + v
        return a * u, (u * before.astype(v.dtype), u.astype(dtype))

    inputs = (a, _before(h), g)
    return lax.scan(step, jnp.zeros(g.shape[1:], a.dtype), inputs, reverse=True, unroll=8)[1]


@functools.partial(jax.jit, static_argnames="dtype")
def _associative(a: jax.Array, b: jax.Array, dtype: str) -> jax.Array:
    return _associative_scan(a, b).astype(dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def _associative_gradients(a: jax.Array, h: jax.Array, g: jax.Array, dtype: str) -> Any:
    u = _associative_scan(jnp.concatenate([a[1:], jnp.zeros_like(a[:1])]), g, reverse=True)
    return u * _before(h).astype(a.dtype), u.astype(dtype)


def _associative_scan(a: jax.Array, b: jax.Array, reverse: bool = False) -> jax.Array:
    def compose(first: Any, second: Any) -> Any:
        return second[0] * first[0], second[0] * first[1] + second[1]

    return lax.associative_scan(compose, (a, b.astype(a.dtype)), reverse=reverse)[1]


def _before(h: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros_like(h[:1]), h[:-1]])


@functools.partial(jax.jit, static_argnames=("axis", "dtype"))
def _ours(a: jax.Array, b: jax.Array, g: jax.Array, axis: int, dtype: str) -> Any:
    h, pull = jax.vjp(lambda a, b: linear_scan(a, b, axis=axis, out_dtype=dtype), a, b)
    return h, *pull(g)


def _split(x: np.ndarray) -> np.ndarray:
    """(time, channels) as (batch, time, 8 channels or less): few that are neighbours."""
    length, channels = x.shape
    return np.moveaxis(x.reshape(length, -1, min(channels, 8)), 1, 0)


def _joined(x: jax.Array) -> np.ndarray:
    return np.moveaxis(np.asarray(x), 0, 1).reshape(x.shape[1], -1)


def _rounded_loop(a: np.ndarray, b: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, ...]:
    """(h, da, db) with each product and each sum rounded by itself, in NumPy; of real numbers."""
    h, da, db = np.empty_like(b), np.zeros_like(a), np.empty_like(g)
    state = np.zeros_like(a[0])
    for t in range(len(a)):
        h[t] = state = a[t] * state + b[t].astype(a.dtype)
    state = np.zeros_like(a[0])
    for t in reversed(range(len(a))):
        db[t] = u = g[t].astype(a.dtype) + state
        if t > 0:
            da[t] = u * h[t - 1].astype(a.dtype)
        state = a[t] * u
    return h, da, db


# ---- Errors --------------------------------------------------------------------------------------


def measure(
    dtype: str, decay: float | str, length: int, channels: int, associative: bool = True
) -> list[dict[str, Any]]:
    """The rows of one problem: h, da and db, with time first and time last."""
    a, b, g = _data(dtype, decay, length, channels)
    wide = np.complex128 if dtype == "complex64" else np.float64
    with jax.default_device(jax.devices("cpu")[0]):
        a_wide, b_wide, g_wide = (x.astype(wide) for x in (a, b, g))
        h = _loop(a_wide, b_wide, np.dtype(wide).name)
        results = (h, *_loop_gradients(a_wide, h, g_wide, h.dtype.name))
        exact = {k: np.asarray(x) for k, x in zip(("h", "da", "db"), results, strict=True)}
        h = _loop(a, b, dtype)
        found = {"sequential": (h, *_loop_gradients(a, h, g, dtype))}
        if associative:
            h = _associative(a, b, dtype)
            found["associative"] = (h, *_associative_gradients(a, h, g, dtype))
    found |= {
        "time first": [_joined(x) for x in _ours(*map(_split, (a, b, g)), axis=1, dtype=dtype)],
        "time last": [x.T for x in _ours(a.T, b.T, g.T, axis=1, dtype=dtype)],
    }
    scales = _scales(exact)
    rows, rounded = [], None
    for k, what in enumerate(("h", "da", "db")):
        errors, starts = {}, {}
        for who, results in found.items():
            x = np.asarray(results[k])
            stored = dtype if what != "da" else a.dtype.name
            errors[who] = _errors(x.astype(wide), exact[what], scales[what], stored)
            starts[who] = _first_infinite(x)
        for layout in ("time first", "time last"):
            row = {"dtype": dtype, "decay": decay, "length": length, "channels": channels}
            row |= {"layout": layout, "what": what}
            who = {"ours": layout, "sequential": "sequential", "associative": "associative"}
            for m, kind in enumerate(("worst", "norm")):
                row[kind] = {k: _short(errors[v][m]) for k, v in who.items() if v in errors}
            least = _HALF_ULP[stored]
            row["ratio"] = _short(errors[layout][0] / max(errors["sequential"][0], least))
            row["ratio_of_norms"] = _short(errors[layout][1] / max(errors["sequential"][1], least))
            if max(row["ratio"], row["ratio_of_norms"]) > 2 and dtype != "complex64":
                if rounded is None and length <= 10**6:
                    rounded = _rounded_loop(a, b, g)
                if rounded:
                    row["rounded_loop"] = np.array_equal(found[layout][k], rounded[k])
            if what == "h" and starts["sequential"] is not None:
                row["overflow"] = {who: starts[who] for who in (layout, "sequential")}
                row["overflow"]["ours"] = row["overflow"].pop(layout)
            rows.append(row)
    return rows


def _data(dtype: str, decay: float | str, length: int, channels: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shape = (length, channels)

    def normal() -> np.ndarray:
        x = rng.standard_normal(shape, np.float32)
        if dtype == "complex64":
            return x + 1j * rng.standard_normal(shape, np.float32)
        return x.astype(jnp.dtype(dtype))

    if decay == "turn":
        a = np.full(shape, 0.9999)
    elif decay == "0.9998 to 1":
        a = rng.uniform(0.9998, 1, shape)
    elif isinstance(decay, str):
        a = rng.uniform(0.9, 1, shape) * rng.choice([-1, 1], shape)
    else:
        a = np.full(shape, float(decay))
    if dtype == "complex64":
        phase = rng.uniform(size=() if decay == "turn" else shape)
        a = (a * np.exp(2j * np.pi * phase)).astype(np.complex64)
    else:
        a = a.astype(np.float32)
    return a, normal(), normal()


def _scales(exact: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    h = np.maximum.accumulate(np.abs(exact["h"]))
    u = np.maximum.accumulate(np.abs(exact["db"])[::-1])[::-1]
    with np.errstate(over="ignore", invalid="ignore"):
        return {"h": h, "da": u * np.concatenate([np.zeros_like(h[:1]), h[:-1]]), "db": u}


def _errors(
    x: np.ndarray, exact: np.ndarray, scale: np.ndarray, stored: str
) -> tuple[float, float]:
    """The worst element's error and the worst channel's; infinite if one is not a number."""
    known = (scale > 0) & (scale < float(jnp.finfo(stored).max) / 4)
    with np.errstate(all="ignore"):
        error, value = (np.where(known, np.abs(y), 0) for y in (x - exact, exact))
        worst = np.max(np.divide(error, scale, out=np.zeros_like(error), where=scale > 0))
        largest = np.maximum(np.max(value, 0), 1e-300)  # squares of large numbers would overflow
        norms = (np.sqrt(np.sum(np.square(y / largest), 0)) for y in (error, value))
        norm = np.max(np.divide(next(norms), np.maximum(next(norms), 1e-300)))
    return _or_infinite(worst), _or_infinite(norm)


def _or_infinite(x: float) -> float:
    return float(np.nan_to_num(x, nan=np.inf))


def _first_infinite(x: np.ndarray) -> int | None:
    """The first step of the first channel that is infinite; the steps after it must be, too."""
    bad = ~np.isfinite(x[:, 0].astype(np.complex128 if np.iscomplexobj(x) else np.float32))
    return int(np.argmax(bad)) if bad.any() else None


def _short(x: float) -> float:
    return float(f"{x:.3g}")


# ---- All of them ---------------------------------------------------------------------------------


def _decays(dtype: str) -> tuple[float | str, ...]:
    missing = "random sign" if dtype == "complex64" else "turn"
    return tuple(decay for decay in DECAYS if decay != missing)


def _task(task: tuple[str, tuple[float | str, ...], int]) -> list[dict[str, Any]]:
    dtype, decays, longest = task
    rows = []
    for decay in decays:
        for length in LENGTHS:
            if length <= longest:
                channels = min(128, max(2, 4 * 10**6 // length))
                rows += measure(dtype, decay, length, channels)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures errors against double precision.")
    parser.add_argument(
        "--out", type=Path, help="default: benchmarks/results/numerics-<device>.json"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1])
    parser.add_argument("--plot", type=Path, nargs="+", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.plot:
        draw(arguments.plot)
        return 0
    start = time.perf_counter()
    parts = min(4, arguments.processes)  # programs are compiled once in each process
    tasks = [
        (dtype, _decays(dtype)[k::parts], arguments.longest)
        for dtype in DTYPES
        for k in range(parts)
    ]
    method = " ".join(str(__doc__).split("\n\n", 1)[1].split())
    results = report.header() | {"method": method, "through_jax": [], "rows": []}
    name = report.slug(report.device())
    out = arguments.out or Path(__file__).parent / "results" / f"numerics-{name}.json"
    rows = results["rows"]
    with multiprocessing.get_context("spawn").Pool(arguments.processes, _start) as pool:
        for found in pool.imap_unordered(_task, tasks, chunksize=1):
            rows += found
            out.write_text(report.text(results))
            for decay in dict.fromkeys(row["decay"] for row in found):
                some = [row for row in found if row["decay"] == decay]
                print(f"{time.perf_counter() - start:.0f} s", line(some), flush=True)
    over = [row for row in rows if row["ratio"] > 2]
    print(*over, f"{len(rows)} rows, {len(over)} above twice the loop's error: {out}", sep="\n")
    return 0


def _start() -> None:
    jax.config.update("jax_enable_x64", True)


# ---- Plot and tables -----------------------------------------------------------------------------

_PANELS = (
    ("float32", 0.5),
    ("float32", 0.99),
    ("float32", 0.9999),
    ("float32", "0.9998 to 1"),
    ("float32", 1),
    ("float32", 1.0001),
    ("float32", "random sign"),
    ("complex64", 1),
    ("complex64", "turn"),
    ("bfloat16", 0.9999),
)
_RESULTS = {"value": ("h",), "gradients": ("da", "db")}


def draw(sources: list[Path]) -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "jax_scan"  # the same file from the same results
    results = [json.loads(source.read_text()) for source in sources]
    figure, axes = plt.subplots(
        4, 5, figsize=(11, 9), sharex=True, sharey=True, layout="constrained"
    )
    entries: dict[str, Any] = {}
    for k, (dtype, decay) in enumerate(_PANELS):
        for m, (title, what) in enumerate(_RESULTS.items()):
            ax = axes[2 * (k // 5) + m, k % 5]
            lines = {"lax.associative_scan": ("associative", results[0], "#ff7f0e", "-")}
            lines["loop"] = ("sequential", results[0], "#7f7f7f", "-")
            for found, style in zip(results, ("-", "--"), strict=False):
                lines[f"jax_scan, {found['device']}"] = ("ours", found, "#1f77b4", style)
            for name, (who, found, colour, style) in lines.items():
                points = _worst(found["rows"], dtype, decay, what, who)
                entries[name] = ax.plot(
                    *zip(*points, strict=True), style, color=colour, marker="."
                )[0]
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.set_ylim(3e-8, 0.1)
            ax.grid(alpha=0.3)
            ax.set_title(f"{dtype}, {decay}: {title}", fontsize=8)
            ax.tick_params(labelsize=7)
    for ax in axes[-1]:
        ax.set_xlabel("L", fontsize=8)
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle("Largest error of an element, relative to the largest value so far")
    docs = Path(__file__).parents[1] / "docs"
    figure.savefig(docs / "numerics.svg", metadata={"Date": None})
    plt.close(figure)
    page = docs / "numerics.md"
    head, rest = page.read_text().split("<!-- table -->\n")
    tail = rest.split("<!-- end of table -->\n")[1]
    table = "".join(f"{line}\n" for line in _table(results))
    page.write_text(f"{head}<!-- table -->\n{table}<!-- end of table -->\n{tail}")


def _worst(
    rows: list[dict[str, Any]], dtype: str, decay: float | str, what: tuple[str, ...], who: str
) -> list[tuple[int, float]]:
    """By length the largest error of these results, over the layouts."""
    found: dict[int, float] = {}
    for row in rows:
        if (row["dtype"], row["decay"]) == (dtype, decay) and row["what"] in what:
            found[row["length"]] = max(found.get(row["length"], 0.0), row["worst"][who])
    return sorted(found.items())


def _table(results: list[dict[str, Any]]) -> list[str]:
    """For each dtype and decay the worst errors at any length, and the largest ratios."""
    devices = [found["device"] for found in results]
    head = ["dtype", "decay", "result", "loop", "`associative_scan`"]
    head += [f"ours, {device}" for device in devices]
    head += [f"times the loop's, {device}" for device in devices]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|" + "--:|" * (len(head) - 3)]
    for dtype in DTYPES:
        for decay in _decays(dtype):
            for name, what in _RESULTS.items():
                if not _worst(results[0]["rows"], dtype, decay, what, "ours"):
                    continue
                cells = [dtype, str(decay), name]
                for who in ("sequential", "associative"):
                    cells.append(_largest(_worst(results[0]["rows"], dtype, decay, what, who)))
                for found in results:
                    cells.append(_largest(_worst(found["rows"], dtype, decay, what, "ours")))
                for found in results:
                    ratios = [
                        row["ratio"]
                        for row in found["rows"]
                        if (row["dtype"], row["decay"]) == (dtype, decay) and row["what"] in what
                    ]
                    cells.append(f"{max(ratios, default=math.nan):.1f}")
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def _largest(points: list[tuple[int, float]]) -> str:
    return f"{max((error for _, error in points), default=math.nan):.1e}"


def line(rows: list[dict[str, Any]]) -> str:
    worst = max(rows, key=lambda row: row["ratio"])
    return (
        f"{worst['dtype']:9} {worst['decay']!s:11} at most {worst['ratio']:g} times the loop's, "
        f"at {worst['what']} {worst['layout']} L={worst['length']}"
    )


if __name__ == "__main__":
    sys.exit(main())
