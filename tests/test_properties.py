"""Random problems under random chains of transformations, against `lax.scan` in double precision.

A chain is applied from the inside out: tangents and pullbacks, each in a random set of arguments
and in one fixed direction, `vmap` of a random subset of arguments at random places, and `jit`.
JAX_SCAN_TEST_EXAMPLES in the environment sets how many chains are drawn, other ones each time, and
makes failures small; the option `-o timeout=0` gives it the time for that. `pytest -rP` prints what
the chains were made of.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, normal
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from programs import lax_scan

from jax_scan import linear_scan

EXAMPLES = int(os.environ.get("JAX_SCAN_TEST_EXAMPLES", "0"))
# Hypothesis varies what it has drawn before, so a few short runs see more than a long one.
PARTS = range(8)


def for_many(check: Callable, strategies: Any, part: int) -> None:
    """Runs check(problem, chain) on many of them, always the same ones by default."""
    counts: Counter[str] = Counter()
    examples = max(EXAMPLES // len(PARTS), 1) if EXAMPLES else 7

    # To shrink a failure means to compile a hundred more programs.
    phases = [Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate]

    @settings(max_examples=examples, phases=phases, deadline=None, database=None)
    @given(*strategies)
    def run(problem, chain):
        order = sum(stage.kind in ("tangent", "pullback") for stage in chain)
        mapped = sum(stage.kind == "vmap" for stage in chain)
        counts.update(
            [
                "chains",
                f"order {order}",
                f"{mapped} mapped axes",
                f"rank {len(problem.shapes['b'])}",
            ]
        )
        counts.update(f"with {name}" for name in problem.shapes)
        counts.update(f"{name} {value}" for name, value in problem.options.items())
        check(problem, chain)

    (run if EXAMPLES else seed(part)(run))()
    print(dict(sorted(counts.items())))


class Problem(NamedTuple):
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    axis: int
    options: dict[str, Any]


class Stage(NamedTuple):
    kind: str
    names: frozenset[str]  # what is differentiated, or mapped
    places: tuple[int, ...] = ()  # of the mapped axis: in each argument, in the results
    size: int = 0


# ---- What is drawn -------------------------------------------------------------------------------


@st.composite
def problems(draw, dtypes: st.SearchStrategy[dict[str, str]], lengths: list[int]) -> Problem:
    def broadcast(shape: tuple[int, ...]) -> tuple[int, ...]:
        """Axes of size 1 and missing axes."""
        shape = tuple(1 if draw(st.booleans()) else n for n in shape)
        while shape[:1] == (1,) and draw(st.booleans()):
            shape = shape[1:]
        return shape

    rank = draw(st.integers(1, 4))
    axis = draw(st.integers(0, rank - 1))
    sizes = st.integers(1, 3)
    shape = tuple(draw(st.sampled_from(lengths) if k == axis else sizes) for k in range(rank))
    shapes = {"a": shape if draw(st.booleans()) else broadcast(shape), "b": shape}
    if draw(st.booleans()):
        shapes["h0"] = broadcast((*shape[:axis], *shape[axis + 1 :]))
    if draw(st.booleans()):
        shapes["reset"] = broadcast(shape[: axis + 1])
    options = {
        "axis": axis - draw(st.sampled_from([0, rank])),
        "reverse": draw(st.booleans()),
        "return_state": draw(st.booleans()),
    }
    return Problem(shapes, draw(dtypes), axis, options)


@st.composite
def chains(draw, derivatives: int, others: int) -> list[Stage]:
    def some(kinds: list[str], most: int) -> list[str]:
        return [
            draw(st.sampled_from(kinds)) for _ in range(draw(st.sampled_from(range(most, -1, -1))))
        ]

    kinds = some(["tangent", "pullback"], derivatives) + some(["vmap", "vmap", "jit"], others)
    names = st.frozensets(st.sampled_from(["a", "b", "h0", "reset"]), min_size=1)
    places = st.tuples(*[st.integers(0, 5)] * 5)
    return [
        Stage(kind, draw(names), draw(places), draw(st.integers(1, 3)))
        for kind in draw(st.permutations(kinds))
    ]


# ---- What is made of it --------------------------------------------------------------------------

Args = Mapping[str, Any]


def base(scan: Callable, problem: Problem) -> Callable[[Args], Any]:
    def f(args: Args) -> Any:
        out = scan(args["a"], args["b"], args.get("h0"), reset=args.get("reset"), **problem.options)
        return out if isinstance(out, tuple) else (out,)

    return f


def split(args: Args, names: frozenset[str]) -> tuple[dict, dict]:
    """The arguments that are differentiated, and the others."""
    moving = {n: x for n, x in args.items() if n in names and n != "reset"}
    moving = moving or {"b": args["b"]}
    return moving, {n: x for n, x in args.items() if n not in moving}


def tangent(f: Callable, names: frozenset[str], dots: Args, args: Args) -> Any:
    moving, fixed = split(args, names)
    return jax.jvp(lambda m: f({**fixed, **m}), (moving,), (dots,))[1]


def pullback(f: Callable, names: frozenset[str], cotangents: Any, args: Args) -> Any:
    moving, fixed = split(args, names)
    return jax.vjp(lambda m: f({**fixed, **m}), moving)[1](cotangents)[0]


def widened(tree: Any) -> Any:
    def wide(x):
        if x.dtype == np.bool_:
            return x
        return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)

    return jax.tree.map(wide, tree)


def structs(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, Any]) -> dict[str, Any]:
    return {n: jax.ShapeDtypeStruct(s, DTYPES.get(dtypes[n], np.bool_)) for n, s in shapes.items()}


def run(problem: Problem, chain: list[Stage]) -> tuple[Any, Any]:
    """The chain over `linear_scan`, and over `lax_scan` with all data widened."""
    rng = np.random.default_rng(0)
    shapes, dtypes = dict(problem.shapes), problem.dtypes | {"reset": "bool"}
    ours, theirs = base(linear_scan, problem), base(lax_scan, problem)

    def data(tree: Any) -> Any:
        return jax.tree.map(lambda s: normal(rng, s.shape, s.dtype.name), tree)

    for kind, names, places, size in chain:
        args = structs(shapes, dtypes)
        if kind == "tangent":
            dots = data(split(args, names)[0])
            ours, theirs = (
                partial(tangent, ours, names, dots),
                partial(tangent, theirs, names, widened(dots)),
            )
        elif kind == "pullback":
            cotangents = data(jax.eval_shape(ours, args))
            ours, theirs = (
                partial(pullback, ours, names, cotangents),
                partial(pullback, theirs, names, widened(cotangents)),
            )
        elif kind == "vmap":
            mapped = [n for n in shapes if n in names] or ["b"]
            axes: dict[str, int | None] = dict.fromkeys(shapes)
            for n, place in zip(mapped, places, strict=False):
                axes[n] = at = place % (len(shapes[n]) + 1)
                shapes[n] = (*shapes[n][:at], size, *shapes[n][at:])
            results, to = jax.eval_shape(ours, args), places[-1]
            out = jax.tree.map(lambda s, to=to: to % (s.ndim + 1), results)
            ours, theirs = jax.vmap(ours, (axes,), out), jax.vmap(theirs, (axes,), out)
        else:
            ours, theirs = jax.jit(ours), jax.jit(theirs)

    args = data(structs({n: s for n, s in shapes.items() if n != "reset"}, dtypes))
    # Factors of modulus below 1.3: chains amplify.
    args["a"] = np.asarray(
        1.3 * np.tanh(args["a"].astype(widened(args["a"]).dtype)), args["a"].dtype
    )
    if "reset" in shapes:
        args["reset"] = rng.uniform(size=shapes["reset"]) < 0.3
    return jax.jit(ours)(args), jax.jit(theirs)(widened(args))


def compare(actual: Any, expected: Any, tolerance: float) -> None:
    leaves = jax.tree.leaves(actual), jax.tree.leaves(expected)
    for x, y in zip(*leaves, strict=True):
        assert x.shape == y.shape
        y = np.asarray(y)
        atol = tolerance * max(1.0, float(np.abs(y).max(initial=0)))
        np.testing.assert_allclose(np.asarray(x).astype(y.dtype), y, rtol=0, atol=atol)


# ---- Tests ---------------------------------------------------------------------------------------

DOUBLE = st.sampled_from(
    [
        {"a": "float64", "b": "float64", "h0": "float64"},
        {"a": "complex128", "b": "complex128", "h0": "complex128"},
        {"a": "float64", "b": "complex128", "h0": "float64"},
    ]
)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_chains_of_transformations(part):
    """Derivatives up to the third order, of mapped scans and mapped, in any order."""

    def check(problem, chain):
        with jax.numpy_dtype_promotion("standard"):
            compare(*run(problem, chain), tolerance=1e-11)

    lengths = [3, 4, 5, 2, 4, 5, 1, 3, 4, 0]
    for_many(check, (problems(DOUBLE, lengths), chains(derivatives=3, others=2)), part)


@st.composite
def mixed(draw) -> dict[str, str]:
    """Any two dtypes; h0 has one that the state holds."""
    a, b = (draw(st.sampled_from(list(DTYPES))) for _ in range(2))
    wide = draw(st.sampled_from(["float32", "float64", a, b]))
    return {"a": a, "b": b, "h0": wide}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_dtypes(part):
    """Mixed dtypes under a derivative and up to three mapped axes."""

    def check(problem, chain):
        # The rounding of what is read and stored, many times over: values are of the order of 1.
        eps = max(float(jnp.finfo(DTYPES[t]).eps) for t in problem.dtypes.values())
        with jax.numpy_dtype_promotion("standard"):
            compare(*run(problem, chain), tolerance=8 * eps)

    lengths = [9, 8, 7, 5, 6, 4, 1, 9, 3, 0]
    for_many(check, (problems(mixed(), lengths), chains(derivatives=1, others=3)), part)
