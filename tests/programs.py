"""What JAX makes of a function: its equations, and its compiled text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

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

    JAX has dropped what is unused by then. A function that is called twice is there once.
    """
    found = re.findall(
        r'custom_call @jax_scan\.v1\.(\w+)\(.*?operands = "([^"]*)", results = "([^"]*)"',
        lowered(f, *args),
    )
    order = re.findall(r"jax_scan\.v1\.(\w+)", lowered(f, *args))
    assert len(order) == len(found)
    return found


def lowered(f: Callable, *args: Any, platform: str | None = None) -> str:
    """The module before XLA's passes."""
    traced = jax.jit(f).trace(*args)
    return (traced.lower(lowering_platforms=(platform,)) if platform else traced.lower()).as_text()


def compiled(f: Callable, *args: Any) -> str:
    return str(jax.jit(f).lower(*args).compile().as_text())


# Operations of a compiled module that neither compute nor move anything.
PASSIVE = {"bitcast", "constant", "custom-call", "get-tuple-element", "parameter", "tuple"}


def movers(program: str, size: int) -> list[str]:
    """The instructions of a compiled module, fused ones included, that read or make an array of at
    least `size` elements, besides the custom calls."""
    found = []
    for line in program.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (.*?[\])}]) ([a-z][\w-]*)\(", line)
        if match is None or match[2] in PASSIVE:
            continue
        shapes = re.findall(r"\b[a-z]+\d*\[([\d,]*)\]", match[1] + line[match.end() :])
        if any(math.prod(map(int, filter(None, s.split(",")))) >= size for s in shapes):
            found.append(line.strip())
    return found


def count(text: str, operation: str) -> int:
    """How often an HLO operation occurs, in fused computations too."""
    return len(re.findall(rf" {operation}\(", text))


def lax_scan(a, b, h0=None, *, reverse=False, reset=None):
    """The recurrence over axis 0 by `lax.scan`, all of it differentiated by JAX."""
    a = jnp.broadcast_to(a, b.shape)
    mask = jnp.zeros(b.shape[0], bool) if reset is None else reset
    if h0 is None:
        h0 = jnp.zeros(b.shape[1:], b.dtype)
        mask = mask.at[-1 if reverse else 0].set(True)

    def step(h, now):
        a, b, cut = now
        h = jnp.where(cut, b, a * h + b)
        return h, h

    return lax.scan(step, h0, (a, b, mask), reverse=reverse)[1]
