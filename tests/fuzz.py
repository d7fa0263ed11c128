"""Random calls through JAX against the NumPy loops of `oracles`, element by element.

A call has a shape of any rank with time anywhere, any dtypes, operands that broadcast, and options.
It is mapped over up to two axes, inside of a derivative or outside, differentiated up to twice with
respect to some of its arguments, compiled or not, and its arrays lie and are distributed in various
ways. Values are ordinary ones, or extreme: zeros of both signs, subnormal numbers, infinities, NaNs
and all magnitudes; of those the first order is checked wherever it is certain.

`python tests/fuzz.py --examples 10000` runs many and writes a log; `test_fuzz.py` a few.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cases import DTYPES, normal
from devices import mesh
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from oracles import HALF_ULP, Oracle, check, check_classes, check_finite, state_dtype

from jax_scan import linear_scan

Arrays = Mapping[str, np.ndarray]

# Derivatives by name: R is the cotangent of the result pulled back, F a tangent pushed forward, the
# second letter what is applied first.
ORDERS = ("value", "F", "R", "FR", "RR", "RF", "FF")
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 33, 64, 65, 100, 129, 256, 257, 300, 513)
SIZES = (1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 0)
MOST_ELEMENTS = 1 << 14


class Level(NamedTuple):
    """One `vmap`."""

    size: int
    mapped: frozenset[str]  # the arguments with such an axis
    place: int  # of this axis in every array, modulo what there is


class Call(NamedTuple):
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    axis: int
    reverse: bool
    return_state: bool
    order: str
    moving: frozenset[str]  # what is differentiated
    levels: tuple[Level, ...]  # from the outermost to the innermost
    outside: int  # how many of them are outside of the derivative
    arrays: str
    compiled: bool
    extreme: bool
    seed: int


# ---- What is drawn -------------------------------------------------------------------------------


@st.composite
def calls(draw) -> Call:
    def some(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    def broadcast(shape: tuple[int, ...]) -> tuple[int, ...]:
        """Axes of size 1 and missing axes."""
        shape = tuple(1 if some(0, 0, 1) else n for n in shape)
        while shape[:1] == (1,) and some(0, 1):
            shape = shape[1:]
        return shape

    rank = some(3, 2, 1, 4, 5)
    axis = draw(st.integers(0, rank - 1))
    length = some(*LENGTHS)
    shape, elements = [0] * rank, max(length, 1)
    for k in draw(st.permutations(range(rank))):
        fitting = [n for n in SIZES if n * elements <= MOST_ELEMENTS]
        shape[k] = length if k == axis else some(*fitting)
        elements *= 1 if k == axis else max(shape[k], 1)
    shape = tuple(shape)
    shapes = {"a": shape if some(0, 1) else broadcast(shape), "b": shape}
    if some(0, 1):
        shapes["h0"] = broadcast((*shape[:axis], *shape[axis + 1 :]))
    if some(0, 0, 1):
        shapes["reset"] = broadcast(shape[: axis + 1])

    names = tuple(DTYPES)
    dtypes = {"a": some("float32", *names)}
    dtypes["b"] = some(dtypes["a"], *names) if some(0, 1) else dtypes["a"]
    with jax.numpy_dtype_promotion("standard"):
        dtypes["out"] = jnp.result_type(DTYPES[dtypes["a"]], DTYPES[dtypes["b"]]).name
    if some(0, 0, 0, 1):
        kinds = [t for t in names if t[0] == "c" or dtypes["out"][0] != "c"]
        dtypes["out"] = some(*kinds)
    state = state_dtype(*(DTYPES[t] for t in dtypes.values()))
    dtypes["h0"] = some(state, *(t for t in names if t[0] != "c" or state[0] == "c"))

    extreme = some(False, False, True)
    order = some(*(ORDERS[:3] if extreme else ORDERS))
    places = st.integers(0, 5)
    arguments = sorted(shapes)
    levels = tuple(
        Level(
            some(2, 3, 1),
            draw(st.frozensets(st.sampled_from(arguments), min_size=1)),
            draw(places),
        )
        for _ in range(some(0, 0, 1, 2))
    )
    return Call(
        shapes,
        dtypes,
        axis,
        reverse=some(False, True),
        return_state=some(False, True),
        order=order,
        moving=draw(st.frozensets(st.sampled_from(sorted({*shapes} - {"reset"})), min_size=1)),
        levels=levels,
        outside=some(*range(len(levels) + 1)),
        arrays=some("plain", "plain", "strided", "transposed", "layout", "sharded"),
        compiled=some(True, True, False),
        extreme=extreme,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def features(call: Call) -> list[str]:
    found = [
        "examples",
        f"order {call.order}",
        f"rank {len(call.shapes['b'])}",
        f"{len(call.levels)} mapped axes",
        f"arrays {call.arrays}",
        "compiled" if call.compiled else "eager",
        "extreme values" if call.extreme else "ordinary values",
        f"a {call.dtypes['a']}",
        f"b {call.dtypes['b']}",
    ]
    shapes, rank = call.shapes, len(call.shapes["b"])
    tests = {
        "mixed dtypes": len({call.dtypes[n] for n in ("a", "b", "out")}) > 1,
        "a broadcast": shapes["a"] != shapes["b"],
        "h0": "h0" in shapes,
        "reset": "reset" in shapes,
        "reverse": call.reverse,
        "return_state": call.return_state,
        "time first": call.axis == 0,
        "time last": call.axis == rank - 1,
        "vmap inside a derivative": len(call.levels) > call.outside and call.order != "value",
        "vmap outside a derivative": bool(call.outside) and call.order != "value",
        "no elements": 0 in shapes["b"],
        "256 steps and more": shapes["b"][call.axis] >= 256,
    }
    return found + [name for name, true in tests.items() if true]


# ---- Data ----------------------------------------------------------------------------------------


def factors(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Of modulus 0.8 to 1.05."""
    x = rng.uniform(0.8, 1.05, shape)
    if dtype.startswith("complex"):
        return np.asarray(x * np.exp(2j * np.pi * rng.uniform(size=shape)), DTYPES[dtype])
    return np.asarray(x * rng.choice([-1, 1], size=shape), DTYPES[dtype])


def extremes(rng: np.random.Generator, dtype: str) -> np.ndarray:
    """Zeros, subnormal numbers, both ends of the range, infinities and NaN."""
    info = jnp.finfo(DTYPES[dtype])
    large = min(1e30, float(info.max))
    kinds = (
        [0.0, -0.0],
        [float(info.smallest_subnormal), -float(info.tiny) / 4],
        [1.5, -1.5],
        [large, -large, 1 / large, -1 / large],
        [float(info.max), -float(info.max)],
        [np.inf, -np.inf, np.nan],
    )
    chosen = rng.uniform(size=len(kinds)) < 0.5
    return np.array([x for k, take in zip(kinds, chosen, strict=True) if take for x in k])


def spoil(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Replaces some, or most, of the numbers by extreme ones."""
    found = extremes(rng, x.dtype.name)
    if not found.size:
        return x
    chosen = rng.uniform(size=x.shape) < rng.choice([0.01, 0.1, 0.6])
    return np.where(chosen, rng.choice(found, size=x.shape).astype(x.dtype), x)


# ---- Arrays with mapped axes ---------------------------------------------------------------------
# Here the mapped axes are the leading ones, in order, of size 1 where an array is not mapped. JAX
# gets them where the levels place them, and only those that are there.


class Axes(NamedTuple):
    """How an array of some rank is mapped over the levels."""

    levels: tuple[Level, ...]
    mapped: tuple[bool, ...]
    rank: int

    def places(self) -> list[int | None]:
        """For each level, from the outermost, where its axis is in what it maps."""
        found: list[int | None] = []
        for k, (level, mapped) in enumerate(zip(self.levels, self.mapped, strict=True)):
            inner = self.rank + sum(self.mapped[k + 1 :])
            found.append(level.place % (inner + 1) if mapped else None)
        return found

    def place(self, x: np.ndarray) -> np.ndarray:
        """From leading axes to where they are placed."""
        unmapped = tuple(k for k, mapped in enumerate(self.mapped) if not mapped)
        x = np.squeeze(x, unmapped)
        places = [at for at in self.places() if at is not None]
        for outer in reversed(range(len(places))):
            x = np.moveaxis(x, outer, outer + places[outer])
        return x

    def lead(self, x: np.ndarray) -> np.ndarray:
        """The inverse."""
        x = np.asarray(x)
        places = [at for at in self.places() if at is not None]
        for outer, at in enumerate(places):
            x = np.moveaxis(x, outer + at, outer)
        return np.expand_dims(x, tuple(k for k, mapped in enumerate(self.mapped) if not mapped))


class Plan(NamedTuple):
    """The data of a call, with leading mapped axes, and how they are mapped."""

    call: Call
    args: Arrays
    dots: tuple[Arrays, Arrays]  # two directions
    g: np.ndarray
    gstate: np.ndarray

    @property
    def rank(self) -> int:
        return len(self.call.shapes["b"])

    def axes_of(self, name: str, derivative: bool = False) -> Axes:
        """Of an argument, or of its tangents and cotangents."""
        mapped = (
            name in level.mapped or (derivative and k < self.call.outside)
            for k, level in enumerate(self.call.levels)
        )
        return Axes(self.call.levels, tuple(mapped), len(self.call.shapes[name]))

    def axes_of_result(self, state: bool) -> Axes:
        levels = self.call.levels
        return Axes(levels, (True,) * len(levels), self.rank - state)


def plan(call: Call) -> Plan:
    rng = np.random.default_rng(call.seed)
    n = tuple(level.size for level in call.levels)
    shape = call.shapes["b"]
    step = (*shape[: call.axis], *shape[call.axis + 1 :])
    wild = functools.partial(spoil, rng) if call.extreme else lambda x: x

    def sizes(name: str, derivative: bool = False) -> tuple[int, ...]:
        lead = (
            level.size if name in level.mapped or (derivative and k < call.outside) else 1
            for k, level in enumerate(call.levels)
        )
        return (*lead, *call.shapes[name])

    args = {}
    for name in call.shapes:
        if name == "reset":
            args[name] = rng.uniform(size=sizes(name)) < rng.choice([0.05, 0.3])
        else:
            draw = factors if name == "a" else normal
            args[name] = wild(draw(rng, sizes(name), call.dtypes[name]))
    first, second = (
        {
            name: wild(normal(rng, sizes(name, derivative=True), call.dtypes[name]))
            for name in sorted(call.moving)
        }
        for _ in range(2)
    )
    state = state_dtype(*(DTYPES[call.dtypes[t]] for t in ("a", "b", "out")))
    g = wild(normal(rng, (*n, *shape), call.dtypes["out"]))
    return Plan(call, args, (first, second), g, wild(normal(rng, (*n, *step), state)))


# ---- The call ------------------------------------------------------------------------------------


def function(p: Plan) -> Callable[..., Any]:
    """(moving, fixed, dots, dots, cotangents) -> a list of what is compared."""
    call = p.call

    def base(moving: Any, fixed: Any) -> Any:
        x = {**moving, **fixed}
        out = linear_scan(
            x["a"], x["b"], x.get("h0"), reset=x.get("reset"), axis=call.axis,
            reverse=call.reverse, return_state=call.return_state, out_dtype=call.dtypes["out"],
        )  # fmt: skip
        return out if isinstance(out, tuple) else (out,)

    def argument_axes(names: Any, level: int, derivative: bool = False) -> dict[str, int | None]:
        return {n: p.axes_of(n, derivative).places()[level] for n in names}

    results = [p.axes_of_result(state) for state in range(1 + call.return_state)]
    fixed_names = call.shapes.keys() - call.moving
    f: Callable[..., Any] = base
    for level in reversed(range(call.outside, len(call.levels))):
        ins = (argument_axes(call.moving, level), argument_axes(fixed_names, level))
        f = jax.vmap(f, ins, tuple(axes.places()[level] for axes in results))

    def pull(f: Callable, x: Any, cotangents: Any) -> Any:
        return jax.vjp(f, x)[1](cotangents)[0]

    def push(f: Callable, x: Any, dots: Any) -> Any:
        return jax.jvp(f, (x,), (dots,))[1]

    def derivative(moving: Any, fixed: Any, dots: Any, more: Any, cotangents: Any) -> Any:
        def inner(x: Any) -> Any:
            return f(x, fixed)

        if call.order == "value":
            return inner(moving)
        one, given = {"F": push, "R": pull}, {"F": dots, "R": cotangents}
        first = call.order[-1]
        if len(call.order) == 1:
            return one[first](inner, moving, given[first])
        then = {"FR": dots, "RR": dots, "RF": cotangents, "FF": more}[call.order]
        return one[call.order[0]](lambda m: one[first](inner, m, given[first]), moving, then)

    gradient = call.order in ("R", "FR", "RR", "RF")
    mapped: Callable[..., Any] = derivative
    for level in reversed(range(call.outside)):
        places = tuple(axes.places()[level] for axes in results)
        dots = argument_axes(call.moving, level, derivative=True)
        ins = (argument_axes(call.moving, level), argument_axes(fixed_names, level), dots, dots)
        mapped = jax.vmap(mapped, (*ins, places), dots if gradient else places)
    return mapped


def given_arrays(p: Plan) -> tuple[Any, ...]:
    """The arguments of `function`, each mapped axis where JAX gets it."""
    call = p.call
    args = {n: p.axes_of(n).place(x) for n, x in p.args.items()}
    moving = {n: x for n, x in args.items() if n in call.moving}
    fixed = {n: x for n, x in args.items() if n not in call.moving}
    dots = [{n: p.axes_of(n, True).place(x) for n, x in d.items()} for d in p.dots]
    cotangents = [p.axes_of_result(state=False).place(p.g)]
    if call.return_state:
        cotangents.append(p.axes_of_result(state=True).place(p.gstate))
    return moving, fixed, *dots, tuple(cotangents)


def run(p: Plan) -> Any:
    call, f, args = p.call, function(p), given_arrays(p)
    rng = np.random.default_rng(call.seed + 1)
    if call.arrays == "strided":
        args = jax.tree.map(lambda x: _strided(rng, x), args)
    elif call.arrays == "layout":
        args = jax.tree.map(lambda x: _with_layout(rng, x), args)
    elif call.arrays == "sharded":
        args = jax.tree.map(functools.partial(_sharded, rng, _mesh()), args)
    elif call.arrays == "transposed":
        orders = jax.tree.map(lambda x: tuple(map(int, rng.permutation(x.ndim))), args)
        args = jax.tree.map(lambda x, order: np.transpose(x, order), args, orders)
        plain = f

        def f(*given):
            back = jax.tree.map(lambda x, order: jnp.transpose(x, np.argsort(order)), given, orders)
            return jax.tree.map(lambda x: x.T, plain(*back))

    with jax.numpy_dtype_promotion("standard"):
        out = jax.jit(f)(*args) if call.compiled else f(*args)
    out = jax.tree.map(np.asarray, out)
    return jax.tree.map(np.transpose, out) if call.arrays == "transposed" else out


def _strided(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """The same numbers in every second place, in Fortran's order, backwards."""
    if x.ndim == 0:
        return x
    room = np.zeros(tuple(2 * n + 1 for n in x.shape), x.dtype, order=rng.choice(["C", "F"]))
    view = room[tuple(slice(1, None, 2) for _ in x.shape)]
    view = np.flip(view) if rng.integers(2) else view
    view[...] = x
    return view


def _with_layout(rng: np.random.Generator, x: np.ndarray) -> jax.Array:
    if x.ndim < 2:
        return jnp.asarray(x)
    order = tuple(map(int, rng.permutation(x.ndim)))
    device = SingleDeviceSharding(jax.devices()[0])
    return jax.device_put(x, Format(Layout(major_to_minor=order), device))


def _sharded(rng: np.random.Generator, over: jax.sharding.Mesh, x: np.ndarray) -> jax.Array:
    """Some axes split over some of the mesh's, where they divide."""
    spec: list[Any] = [None] * x.ndim
    for name, size in over.shape.items():
        fitting = [k for k in range(x.ndim) if x.shape[k] % size == 0 and spec[k] is None]
        if fitting and rng.integers(3):
            spec[rng.choice(fitting)] = name
    return jax.device_put(x, NamedSharding(over, PartitionSpec(*spec)))


def _mesh() -> jax.sharding.Mesh:
    many = len(jax.devices()) >= 4
    return mesh(x=2, y=2) if many else mesh(x=1)


# ---- What is expected ----------------------------------------------------------------------------


def verify(call: Call) -> None:
    p = plan(call)
    compare(p, run(p))


def compare(p: Plan, out: Any) -> None:
    call = p.call
    n = tuple(level.size for level in call.levels)
    full = (*n, *call.shapes["b"])
    axis = len(n) + call.axis
    ranks = {"a": p.rank, "b": p.rank, "h0": p.rank - 1, "reset": call.axis + 1}

    def aligned(name: str, x: np.ndarray) -> np.ndarray:
        """Mapped axes in front, then as many as the argument may have."""
        missing = ranks[name] - len(call.shapes[name])
        return np.expand_dims(x, tuple(range(len(n), len(n) + missing)))

    state = state_dtype(*(DTYPES[call.dtypes[t]] for t in ("a", "b", "out")))
    args = {}
    for name, x in p.args.items():
        if name == "h0" and HALF_ULP[x.dtype.name] < HALF_ULP[state]:  # is rounded first
            with np.errstate(over="ignore"):
                x = x.astype(state if np.iscomplexobj(x) else np.zeros(0, state).real.dtype)
        if name in call.moving:  # outside of the derivative each item has its own
            lead = [n[k] if k < call.outside else x.shape[k] for k in range(len(n))]
            x = np.broadcast_to(x, (*lead, *x.shape[len(n) :]))
        args[name] = aligned(name, x)
    oracle = Oracle(
        args["a"], args["b"], args.get("h0"), axis=axis, reverse=call.reverse,
        reset=args.get("reset"), out_dtype=DTYPES[call.dtypes["out"]], shape=full,
    )  # fmt: skip
    first, second = ({f"d{k}": aligned(k, x) for k, x in d.items()} for d in p.dots)
    gstate = p.gstate if call.return_state else np.zeros_like(p.gstate)

    gradients = None
    with np.errstate(all="ignore"):
        if call.order == "value":
            results = oracle.values()
        elif call.order == "F":
            results = oracle.tangents(**first)
        elif call.order == "FF":
            results = oracle.tangents_of_tangents(first, second)
        elif call.order == "R":
            results = ()
            gradients = oracle.cotangents(p.g, gstate)
        else:
            results = ()
            gradients = oracle.tangents_of_cotangents(p.g, gstate, **first, order=call.order)

    judge = check_finite if call.extreme or "float16" in call.dtypes.values() else check
    if gradients is None:
        dtypes = (call.dtypes["out"], state)
        for k, (x, expected) in enumerate(zip(out, results, strict=False)):
            x = p.axes_of_result(state=bool(k)).lead(x)
            what = f"result {k} of {call.order}"
            assert x.dtype == dtypes[k], (what, x.dtype)
            judge(x, expected, what)
            if call.extreme and k == 0 and call.order == "value" and state[0] == "f":
                check_classes(x, oracle, what)
    else:
        assert out.keys() == call.moving
        for name, x in out.items():
            expected, what = gradients[name], f"gradient {name} of {call.order}"
            assert x.dtype == call.dtypes[name], (what, x.dtype)
            x = p.axes_of(name, derivative=True).lead(x)
            assert x.shape == p.dots[0][name].shape, (what, x.shape)
            judge(x.reshape(expected.value.shape), expected, what)


# ---- Many ----------------------------------------------------------------------------------------


class Batch(NamedTuple):
    counts: Counter[str]
    failures: list[str]


def batch(examples: int, number: int, shrink: bool = False) -> Batch:
    """Runs so many examples, always the same ones for a number; stops at a failure."""
    counts: Counter[str] = Counter()
    failed = False

    @seed(number)
    @settings(
        max_examples=examples,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls())
    def check_one(call: Call) -> None:
        nonlocal failed
        if not failed:  # what follows a failure makes it smaller
            counts.update(features(call))
        failed = True
        verify(call)
        failed = False

    try:
        check_one()
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        where = "".join(traceback.format_exception(error, limit=-3))[-2000:]
        return Batch(counts, [f"batch {number}: {where}\n{notes}"])
    return Batch(counts, [])


def configure() -> None:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 8)


def _batch(arguments: tuple[int, int]) -> Batch:
    jax.clear_caches()
    return batch(*arguments, shrink=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs many random calls and writes a log.")
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--log", type=Path, help="default: tests/logs/fuzz-jax-{cpu,cuda}.json")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share a GPU

    start, size = time.time(), 50
    numbers = [arguments.seed + k for k in range(-(-arguments.examples // size))]
    counts: Counter[str] = Counter()
    failures: list[str] = []
    # Fresh processes now and then: compiled programs stay in memory.
    with multiprocessing.get_context("spawn").Pool(
        arguments.processes, configure, maxtasksperchild=40
    ) as pool:
        for done in pool.imap_unordered(_batch, [(size, number) for number in numbers]):
            counts += done.counts
            failures += done.failures
            print(*done.failures, sep="\n", end="", flush=True)
            if time.time() - start > arguments.seconds:
                pool.terminate()
                break
    configure()
    log = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "device": jax.devices()[0].device_kind,
        "platform": f"{platform.machine()}, Python {platform.python_version()}",
        "versions": {n: importlib.metadata.version(n) for n in ("jax", "numpy", "hypothesis")},
        "seed": arguments.seed,
        "examples": counts.pop("examples"),
        "failures": failures,
        "seconds": round(time.time() - start),
        "processes": arguments.processes,
        "counts": dict(sorted(counts.items())),
    }
    kind = "cpu" if jax.default_backend() == "cpu" else "cuda"
    out = arguments.log or Path(__file__).parent / "logs" / f"fuzz-jax-{kind}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(log, indent=1) + "\n")
    print(f"{log['examples']} examples, {len(failures)} failures, {log['seconds']} s: {out}")
    return 1 if failures else 0


def _commit() -> str:
    """JAX_SCAN_COMMIT says it where the sources have no history."""
    if commit := os.environ.get("JAX_SCAN_COMMIT"):
        return commit
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
