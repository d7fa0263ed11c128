"""`python -m jax_scan`: what this machine has, whether the scan is right on it, and how fast.

Checks the value and the gradients of the scan against the plain loop in torch (in NumPy where torch
is not installed), then times it beside JAX's own scans and beside the elementwise operation that
moves the same memory. Exits with 0 if all values are right, with 1 if one is
wrong or there is no kernel for the GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import lax

import jax_scan
from jax_scan._measure import microseconds, three_in_two_out, two_in_one_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

try:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError:
    sys.exit(
        "python -m jax_scan prints with rich, which is not installed: pip install 'jax_scan[cli]'"
    )

ORIGINAL_SHAPE = (32, 4096, 256)
# A CPU gets fewer rows: seconds instead of minutes, and arrays that the C library need not map
# afresh, page by page, in every call.
CPU_SHAPE = (4, 1024, 256)
TOLERANCE = 1e-4


class Problem(NamedTuple):
    """a, b and the cotangent of h."""

    a: np.ndarray
    b: np.ndarray
    g: np.ndarray


def main(argv: list[str] | None = None) -> int:
    """The command: returns its exit code."""
    arguments = _parse(argv)
    console = Console()
    on_gpu = jax.default_backend() == "gpu"
    shape = arguments.shape or (ORIGINAL_SHAPE if on_gpu else CPU_SHAPE)
    report: dict[str, Any] = {"environment": _environment(), "shape": list(shape)}
    _print_environment(console, report["environment"])
    if on_gpu and jax_scan.kernels()["cuda"] != "available":
        console.print("[red]There is a GPU, but no kernel for it.[/]")
        return _finish(arguments.json, report | {"ok": False})
    original = "x".join(map(str, ORIGINAL_SHAPE))
    note = "the original problem" if shape == ORIGINAL_SHAPE else f"in place of {original}"
    console.print(f"\nProblem: (B, L, D) = {shape}, float32; {note}")

    problem = _problem(shape)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        report["checks"] = list(_tracked(progress, _checks(problem)))
        report["timings"] = list(_tracked(progress, _timings(problem)))
    report["ok"] = all(check["ok"] for check in report["checks"])

    _print_checks(console, report["checks"])
    _print_timings(console, report["timings"])
    console.print(
        "[green]All values are right.[/]" if report["ok"] else "[red]A value is wrong.[/]"
    )
    return _finish(arguments.json, report)


def _finish(file: Path | None, report: dict[str, Any]) -> int:
    """Writes the report, if it is wanted, and returns the exit code."""
    if file:
        file.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["ok"] else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    def sizes(text: str) -> tuple[int, ...]:
        parts = text.split(",")
        if len(parts) != 3 or not all(n.isdecimal() and int(n) > 0 for n in parts):
            raise argparse.ArgumentTypeError(f"must be B,L,D, three sizes above zero, got {text!r}")
        return tuple(map(int, parts))

    def writable(text: str) -> Path:
        path = Path(text)
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is not a file in an existing folder")
        return path

    parser = argparse.ArgumentParser(
        prog="python -m jax_scan", description="Checks and times the scan on this machine."
    )
    parser.add_argument(
        "--json", type=writable, metavar="FILE", help="write all that is printed here"
    )
    parser.add_argument(
        "--shape",
        type=sizes,
        metavar="B,L,D",
        help="sizes of the problem (default: 32,4096,256 on a GPU, 4,1024,256 on a CPU)",
    )
    return parser.parse_args(argv)


def _environment() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "jax_scan": _version("jax_scan")}
    versions |= {name: _version(name) for name in ("jax", "jaxlib", "numpy", "torch")}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()],
        "kernels": jax_scan.kernels(),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _problem(shape: tuple[int, ...]) -> Problem:
    rng = np.random.default_rng(0)
    a = rng.random(shape, dtype=np.float32) * 0.4 + 0.6
    b, g = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    return Problem(a, b, g)


# ---- Checks --------------------------------------------------------------------------------------


Step = tuple[str, "Callable[[], dict[str, Any] | list[dict[str, Any]]]"]


def _tracked(progress: Progress, steps: Iterator[Step]) -> Iterator[dict[str, Any]]:
    """Runs the steps one by one, telling which one is running."""
    for what, step in steps:
        task = progress.add_task(what, total=1)
        found = step()
        progress.update(task, completed=1)
        yield from found if isinstance(found, list) else [found]


def _checks(problem: Problem) -> Iterator[Step]:
    has_torch = importlib.util.find_spec("torch") is not None
    name = "the PyTorch loop" if has_torch else "a float64 NumPy loop"
    expected: list[np.ndarray] = []

    def reference() -> list[dict[str, Any]]:
        expected.extend((_torch_loop if has_torch else _numpy_loop)(problem))
        return []

    def ours() -> list[dict[str, Any]]:
        results = jax.jit(_value_and_gradients(jax_scan.linear_scan))(*problem)
        return [
            _compare(f"{what} against {name}", got, want)
            for what, got, want in zip(("h", "da", "db"), results, expected, strict=True)
        ]

    yield f"running {name}", reference
    yield "checking value and gradients", ours
    if has_torch:
        yield "checking and timing the torch module", lambda: _model(problem)


def _compare(what: str, got: Any, want: Any) -> dict[str, Any]:
    """NaN is a difference too. The tolerance is relative where values exceed 1."""
    got, want = np.asarray(got), np.asarray(want)
    difference = np.abs(got - want)
    return {
        "what": what,
        "largest_difference": float(np.max(difference)),
        "tolerance": TOLERANCE,
        "ok": bool(np.all(difference <= TOLERANCE * np.maximum(1, np.abs(want)))),
    }


def _value_and_gradients(scan: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    def run(a: jax.Array, b: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        h, pull_back = jax.vjp(scan, a, b)
        return h, *pull_back(g)

    return run


def _numpy_loop(problem: Problem) -> tuple[np.ndarray, ...]:
    a, b, g = problem
    h, da, db = (np.empty_like(b) for _ in range(3))
    state = np.zeros((b.shape[0], b.shape[2]))
    for t in range(b.shape[1]):
        state = (a[:, t] if t else 0) * state + b[:, t]
        h[:, t] = state
    state[:] = 0
    for t in reversed(range(b.shape[1])):
        state += g[:, t]
        db[:, t] = state
        da[:, t] = state * h[:, t - 1] if t else 0
        state *= a[:, t]
    return h, da, db


def _torch_loop(problem: Problem) -> tuple[np.ndarray, ...]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b, g = (torch.tensor(x, device=device) for x in problem)
    a.requires_grad_()
    b.requires_grad_()
    # Split once: the gradient of an index as in a[:, t] would fill an array of a's size at each t.
    steps = list(zip(a.unbind(1), b.unbind(1), strict=True))
    h_t = steps[0][1]
    outputs = [h_t]
    for a_t, b_t in steps[1:]:
        h_t = a_t * h_t + b_t
        outputs.append(h_t)
    h = torch.stack(outputs, dim=1)
    gradients = torch.autograd.grad(h, (a, b), g, allow_unused=True, materialize_grads=True)
    return tuple(x.detach().cpu().numpy() for x in (h, *gradients))


def _model(problem: Problem) -> list[dict[str, Any]]:
    """ModelNew against Reference, and its speed-up over it."""
    import torch

    from jax_scan.torch import ModelNew, Reference

    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        return []  # a torch without CUDA, next to a JAX with it
    device = "cuda" if on_gpu else "cpu"
    a, b = (torch.tensor(x, device=device) for x in problem[:2])

    def timed(model: torch.nn.Module, calls: int) -> float:
        times = []
        for _ in range(4):
            start = time.perf_counter()
            for _ in range(calls):
                model(a, b)
            if on_gpu:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / calls)
        return statistics.median(times[1:]) * 1e6

    model, reference = ModelNew(b.shape[2]), Reference(b.shape[2])
    check = _compare("ModelNew against Reference", model(a, b).cpu(), reference(a, b).cpu())
    check["model_us"] = timed(model, 50 if on_gpu else 5)
    check["reference_us"] = timed(reference, 1)
    check["speed_up"] = check["reference_us"] / check["model_us"]
    return [check]


# ---- Timings -------------------------------------------------------------------------------------


def _lax_scan(a: jax.Array, b: jax.Array) -> jax.Array:
    def step(h: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h = now[0] * h + now[1]
        return h, h

    # h_0 = b_0 whatever a_0 holds is left aside here: it makes no difference to the time.
    time_first = a.swapaxes(0, 1), b.swapaxes(0, 1)
    return lax.scan(step, b[:, 0] * 0, time_first)[1].swapaxes(0, 1)


def _associative_scan(a: jax.Array, b: jax.Array) -> jax.Array:
    def compose(first: Any, then: Any) -> Any:
        return then[0] * first[0], then[0] * first[1] + then[1]

    return lax.associative_scan(compose, (a, b), axis=1)[1]


def _timings(problem: Problem) -> Iterator[Step]:
    arrays: list[jax.Array] = []

    def limit() -> dict[str, Any]:
        arrays.extend(map(jax.device_put, problem))
        a, b, g = arrays
        forward = microseconds(jax.jit(two_in_one_out), a, b)
        backward = microseconds(jax.jit(three_in_two_out), a, b, g)
        return _timing("elementwise limit", forward, forward + backward)

    def timed(name: str, scan: Callable[..., jax.Array]) -> dict[str, Any]:
        a, b, g = arrays
        gradients = _value_and_gradients(scan)
        return _timing(
            name,
            microseconds(jax.jit(scan), a, b),
            microseconds(jax.jit(lambda *args: gradients(*args)[1:]), a, b, g),
        )

    yield "timing the elementwise limit", limit
    for name, scan in (
        ("jax_scan", jax_scan.linear_scan),
        ("lax.associative_scan", _associative_scan),
        ("lax.scan", _lax_scan),
    ):
        yield f"timing {name}", lambda name=name, scan=scan: timed(name, scan)


def _timing(name: str, forward: float, both: float) -> dict[str, Any]:
    return {"what": name, "forward_us": forward, "forward_backward_us": both}


# ---- Printing ------------------------------------------------------------------------------------


def _print_environment(console: Console, environment: dict[str, Any]) -> None:
    table = Table(title="jax_scan on this machine", show_header=False, title_justify="left")
    versions = environment["versions"].items()
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in versions))
    table.add_row("devices", ", ".join(environment["devices"]))
    for name, state in environment["kernels"].items():
        table.add_row(f"{name} kernel", state)
    console.print(table)


def _print_checks(console: Console, checks: list[dict[str, Any]]) -> None:
    table = Table(title=f"Largest differences (tolerance {TOLERANCE:g})", title_justify="left")
    for column in ("", "difference", ""):
        table.add_column(column, justify="left")
    for check in checks:
        verdict = "[green]right[/]" if check["ok"] else "[red]wrong[/]"
        if "speed_up" in check:
            verdict += (
                f", {check['speed_up']:,.0f} times faster"
                f" ({_time(check['model_us'])} against {_time(check['reference_us'])})"
            )
        table.add_row(check["what"], f"{check['largest_difference']:.3g}", verdict)
    console.print(table)


def _print_timings(console: Console, timings: list[dict[str, Any]]) -> None:
    limit = timings[0]
    table = Table(title="Time of a call, and the limit's share of it", title_justify="left")
    table.add_column("")
    for column in ("forward", "limit / it", "with gradients", "limit / it"):
        table.add_column(column, justify="right")
    for row in timings:
        cells = []
        for key in ("forward_us", "forward_backward_us"):
            cells += [_time(row[key]), f"{limit[key] / row[key]:.3g}"]
        table.add_row(row["what"], *cells)
    console.print(table)
    console.print(
        "The limit is XLA's elementwise operation on as many arrays: 2 read and 1 written forward, "
        "3 read and 2 written for the gradients."
    )


def _time(us: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(us)))
    return f"{us:,.{min(digits, 1)}f} us"


if __name__ == "__main__":
    # torch has its share of the same card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sys.exit(main())
