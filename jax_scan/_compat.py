"""Every difference between JAX versions that the package meets, with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.interpreters import partial_eval


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual mesh axes over which a value may differ, as `jax.shard_map` tracks them.

    JAX 0.8 calls the set `aval.vma`; later versions have it inside `aval.manual_axis_type`.
    """
    manual = getattr(aval, "manual_axis_type", None)
    return manual.varying if manual is not None else aval.vma


def as_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Marks `x` as varying over more manual axes; its transpose sums over them.

    `lax.pvary` of JAX 0.8 became `lax.pcast` and went away in 0.10.
    """
    if hasattr(lax, "pcast"):
        return lax.pcast(x, axes, to="varying")
    return lax.pvary(x, axes)  # type: ignore[attr-defined]


def reshard(x: jax.Array, sharding: Any) -> jax.Array:
    """`x` sharded over explicit mesh axes. JAX 0.8 has `jax.reshard` in `jax.sharding`.

    There it fails for an array on another device, so what is not traced is put in place.
    """
    if not isinstance(x, Tracer) and isinstance(sharding.mesh, jax.sharding.Mesh):
        return jax.device_put(x, sharding)
    function = getattr(jax, "reshard", None) or jax.sharding.reshard
    return function(x, sharding)


def register_dce(primitive: Any, rule: Callable[[list[bool], Any], tuple[list[bool], Any]]) -> None:
    """Registers what becomes of an equation some of whose results are unused.

    `rule` maps (used results, equation) to (used operands, equation or None). That is how JAX calls
    it up to 0.11; 0.12 also says, in between, which operands are live. Nothing promises that the
    table stays in `jax.interpreters`: without it only speed is lost.
    """
    rules = getattr(partial_eval, "dce_rules", None)
    if rules is not None:
        rules[primitive] = lambda used, *rest: rule(used, rest[-1])
