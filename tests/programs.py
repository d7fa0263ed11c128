"""What JAX makes of a function: its equations, and its compiled text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SCANS = ("linear_scan", "linear_scan_tangent", "linear_scan_cotangent")


def equations(f: Callable, *args: Any) -> list[Any]:
    """All equations of f, those of inner functions included."""

    def walk(jaxpr) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            yield equation
            for value in equation.params.values():
                for inner in value if isinstance(value, (tuple, list)) else (value,):
                    if hasattr(inner, "eqns"):
                        yield from walk(inner)

    return list(walk(jax.make_jaxpr(f)(*args)))


def scans(f: Callable, *args: Any) -> list[tuple[str, str, str]]:
    """The scans that f binds: the primitive, its operands and its results."""
    return [
        (
            str(e.primitive).removeprefix("linear_scan").removeprefix("_") or "scan",
            " ".join(e.params["operands"]),
            " ".join(result.name for result in e.params["results"]),
        )
        for e in equations(f, *args)
        if str(e.primitive) in SCANS
    ]


def calls(f: Callable, *args: Any) -> list[tuple[str, str, str]]:
    """The custom calls of f's module before XLA's passes, as `scans` has them.

    JAX has dropped what is unused by then. A function that is called twice is there once. The
    memory that calls on a GPU have to work in is left out.
    """
    found = re.findall(
        r'custom_call @jax_scan\.v1\.(\w+)\(.*?operands = "([^"]*)".*?results = "([^"]*)"',
        lowered(f, *args),
    )
    order = re.findall(r"jax_scan\.v1\.(\w+)", lowered(f, *args))
    assert len(order) == len(found)
    return [(name, given, results.removesuffix(" workspace")) for name, given, results in found]


def lowered(f: Callable, *args: Any, platform: str | None = None) -> str:
    """The module before XLA's passes."""
    traced = jax.jit(f).trace(*args)
    return (traced.lower(lowering_platforms=(platform,)) if platform else traced.lower()).as_text()


def compiled(f: Callable, *args: Any) -> str:
    return str(jax.jit(f).lower(*args).compile().as_text())


# Operations of a compiled module that neither compute nor move anything.
PASSIVE = {"bitcast", "constant", "custom-call", "get-tuple-element", "parameter", "tuple"}


def movers(program: str, size: int) -> list[str]:
    """The instructions of a compiled module, fused ones included, that make an array of at least
    `size` elements, besides the custom calls."""
    found = []
    for line in program.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (.*?[\])}]) ([a-z][\w-]*)\(", line)
        if match is None or match[2] in PASSIVE:
            continue
        shapes = re.findall(r"\b[a-z]+\d*\[([\d,]*)\]", match[1])
        if any(math.prod(map(int, filter(None, s.split(",")))) >= size for s in shapes):
            found.append(line.strip())
    return found


def count(text: str, operation: str) -> int:
    """How often an HLO operation occurs, in fused computations too."""
    return len(re.findall(rf" {operation}\(", text))


def lax_scan(
    a: Any,
    b: Any,
    h0: Any = None,
    *,
    axis: int = -2,
    reverse: bool = False,
    reset: Any = None,
    return_state: bool = False,
) -> Any:
    """`linear_scan` of float64 or complex128 data by `lax.scan`; JAX differentiates all of it."""
    a, b = jnp.asarray(a), jnp.asarray(b)
    dtype = jnp.promote_types(a.dtype, b.dtype)
    axis %= b.ndim
    step = (*b.shape[:axis], *b.shape[axis + 1 :])

    def in_time(x, dtype):
        x = jnp.asarray(x, dtype)
        x = x.reshape((1,) * (b.ndim - x.ndim) + x.shape)
        return jnp.moveaxis(jnp.broadcast_to(x, b.shape), axis, 0)

    cut = np.zeros(b.shape[axis], bool)
    cut[slice(-1, None) if reverse else slice(1)] = h0 is None
    if reset is not None:
        reset = jnp.broadcast_to(reset, b.shape[: axis + 1])
        cut = in_time(reset.reshape(reset.shape + (1,) * (b.ndim - axis - 1)), bool) | cut.reshape(
            (-1,) + (1,) * len(step)
        )
    state = jnp.zeros((), dtype) if h0 is None else jnp.asarray(h0, dtype)
    state = jnp.broadcast_to(state.reshape((1,) * (len(step) - state.ndim) + state.shape), step)

    def next_step(h, now):
        a, b, cut = now
        h = jnp.where(cut, b, a * h + b)
        return h, h

    last, h = lax.scan(
        next_step, state, (in_time(a, dtype), in_time(b, dtype), cut), reverse=reverse
    )
    h = jnp.moveaxis(h, 0, axis)
    return (h, last) if return_state else h
