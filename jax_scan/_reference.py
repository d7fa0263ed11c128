"""The recurrence in `lax`, and its derivatives written out in terms of it.

This is what platforms without a kernel run, and what `_primitives` differentiates when a derivative
is itself differentiated. Names and conventions, for all three operations:

    scan       h_t = a_t h_prev + b_t,                     h before the first step: h0
    tangent    dh_t = a_t dh_prev + (da_t h_prev + db_t),  dh before the first step: dh0
    cotangent  u_t = g_t + v_next,  v_t = a_t u_t,         v after the last step: gstate
               db_t = u_t,  da_t = u_t h_prev,  dh0 = v at the first step

"prev" and "next" follow the order in which h is computed, so the cotangent walks the other way. A
step is *cut* where `reset` is true, and at the first step if there is no h0: a_t is not read and
nothing passes, in either direction. Operands have equal rank and may have size 1 in any axis where
the full shape is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scan import _compat

Operands = Mapping[str, jax.Array]
Shape = tuple[int, ...]


class Recurrence(NamedTuple):
    """What the operations of one scan have in common."""

    axis: int  # time
    length: int
    reverse: bool
    has_h0: bool
    state: np.dtype  # in which all arithmetic is done


class Result(NamedTuple):
    """A result that is wanted of an operation."""

    name: str
    shape: Shape
    dtype: np.dtype


def step_shape(full: Shape, axis: int) -> Shape:
    """The shape of one step, time axis kept: that of h0, of states and of their derivatives."""
    return (*full[:axis], 1, *full[axis + 1 :])


def full_shape(recurrence: Recurrence, shapes: Iterable[Shape]) -> Shape:
    """The shape that operands of these shapes broadcast to."""
    shapes = list(shapes)
    time = [1] * len(shapes[0])
    time[recurrence.axis] = recurrence.length
    return lax.broadcast_shapes(tuple(time), *shapes)


def convert(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in another dtype; of a complex number that becomes real, the real part."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(
        dtype, jnp.complexfloating
    ):
        x = lax.real(x)
    return lax.convert_element_type(x, dtype)


def fit(x: jax.Array, full: Shape, shape: Shape, dtype: Any) -> jax.Array:
    """Broadcasts `x` to `full`, then sums over the axes in which `shape` has size 1."""
    summed = tuple(k for k, (n, m) in enumerate(zip(full, shape, strict=True)) if n != m)
    x = jnp.broadcast_to(x, full)
    if summed:
        x = lax.expand_dims(lax.reduce_sum(x, summed), summed)
    return convert(x, dtype)


def scan(
    recurrence: Recurrence, operands: Operands, dtype: Any, with_state: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """h in `dtype` and, if wanted, the state after the last step."""
    axis, length, reverse, has_h0, state_dtype = recurrence
    shape = full_shape(recurrence, (x.shape for x in operands.values()))
    values = {name: operands[name] for name in ("a", "b")}
    cut = _cut(recurrence, operands)
    if cut is not None:
        values["cut"] = cut

    if has_h0:
        initial = convert(operands["h0"], state_dtype)
    else:
        initial = jnp.zeros((1,) * len(shape), state_dtype)
    initial = lax.squeeze(jnp.broadcast_to(initial, step_shape(shape, axis)), (axis,))
    varying = frozenset().union(*(_compat.varying_axes(jax.typeof(x)) for x in operands.values()))
    missing = varying - _compat.varying_axes(jax.typeof(initial))
    if missing:
        initial = _compat.as_varying(initial, tuple(missing))

    if 0 in shape:
        return jnp.zeros(shape, dtype), lax.expand_dims(initial, (axis,)) if with_state else None

    # Operands that do not depend on time stay out of the loop's inputs.
    constant = {k: lax.squeeze(x, (axis,)) for k, x in values.items() if x.shape[axis] == 1}
    streamed = {k: jnp.moveaxis(x, axis, 0) for k, x in values.items() if k not in constant}

    def step(h, now):
        now = constant | now
        b = convert(now["b"], state_dtype)
        h = convert(now["a"], state_dtype) * h + b
        if "cut" in now:
            h = jnp.where(now["cut"], b, h)
        return h, convert(h, dtype)

    state, h = lax.scan(step, initial, streamed, length=length, reverse=reverse)
    return jnp.moveaxis(h, 0, axis), lax.expand_dims(state, (axis,)) if with_state else None


Scan = Callable[..., tuple[jax.Array, jax.Array | None]]


def tangent(
    recurrence: Recurrence,
    operands: Operands,
    dtype: Any,
    with_state: bool = False,
    *,
    scan: Scan = scan,
) -> tuple[jax.Array, jax.Array | None]:
    """dh = scan(a, da h_prev + db, dh0), and the tangent of the last state."""
    a, da, db, dh0 = operands["a"], operands.get("da"), operands.get("db"), operands.get("dh0")
    b = None
    if da is not None:
        h_prev = _previous(recurrence, operands["h"], operands.get("h0"))
        b = _product(recurrence, da, h_prev, _cut(recurrence, operands))
    if db is not None:
        db = convert(db, recurrence.state)
        b = db if b is None else b + db
    if b is None:
        b = jnp.zeros((1,) * a.ndim, recurrence.state)
    inner = {"a": a, "b": b, "h0": dh0, "reset": operands.get("reset")}
    return scan(recurrence._replace(has_h0=dh0 is not None), _present(inner), dtype, with_state)


def cotangent(
    recurrence: Recurrence, operands: Operands, results: tuple[Result, ...], *, scan: Scan = scan
) -> list[jax.Array]:
    """v = scan(a, a g, gstate) the other way, u = g + v_next; da, db and dh0 as far as wanted."""
    axis, state = recurrence.axis, recurrence.state
    a, g, gstate = operands["a"], operands.get("g"), operands.get("gstate")
    wanted = {result.name for result in results}
    full = full_shape(recurrence, [x.shape for x in (*operands.values(), *results)])
    cut = _cut(recurrence, operands)
    backward = recurrence._replace(reverse=not recurrence.reverse, has_h0=gstate is not None)

    # A cut step has v_t = 0: the scan for v is cut there too, with a zero in place of a g.
    ag = jnp.zeros((1,) * a.ndim, state) if g is None else _product(recurrence, a, g, cut)
    inner = {"a": a, "b": ag, "h0": gstate, "reset": cut}
    v, dh0 = scan(backward, _present(inner), state, "dh0" in wanted)
    u = _previous(backward, v, gstate)
    if g is not None:
        u = u + convert(g, state)
    values = {"db": u, "dh0": dh0}
    if "da" in wanted:
        h_prev = _previous(recurrence, operands["h"], operands.get("h0"))
        values["da"] = _product(recurrence, u, h_prev, cut)
    return [
        fit(
            values[result.name],
            step_shape(full, axis) if result.name == "dh0" else full,
            result.shape,
            result.dtype,
        )
        for result in results
    ]


def _present(operands: Mapping[str, jax.Array | None]) -> dict[str, jax.Array]:
    return {name: x for name, x in operands.items() if x is not None}


def _first(recurrence: Recurrence, rank: int) -> jax.Array:
    """True at the first step; of size 1 in every axis but time."""
    axis, others = recurrence.axis, recurrence.length - 1
    if others < 0:
        return jnp.zeros(tuple(int(k != axis) for k in range(rank)), bool)
    # Padding needs no index, which would have to be of 64 bits in a long scan.
    padding = [(0, 0, 0)] * rank
    padding[axis] = (others, 0, 0) if recurrence.reverse else (0, others, 0)
    return lax.pad(jnp.ones((1,) * rank, bool), np.False_, padding)


def _cut(recurrence: Recurrence, operands: Operands) -> jax.Array | None:
    """True at the cut steps; None if there are none."""
    reset = operands.get("reset")
    if recurrence.has_h0:
        return reset
    first = _first(recurrence, operands["a"].ndim)
    return first if reset is None else first | reset


def _product(
    recurrence: Recurrence, x: jax.Array, y: jax.Array, cut: jax.Array | None
) -> jax.Array:
    """x y, and 0 where cut. Both factors are masked: no derivative meets what a cut step holds."""
    x, y = convert(x, recurrence.state), convert(y, recurrence.state)
    if cut is not None:
        zero = jnp.zeros((), recurrence.state)
        x, y = jnp.where(cut, zero, x), jnp.where(cut, zero, y)
    return x * y


def _previous(recurrence: Recurrence, x: jax.Array, initial: jax.Array | None) -> jax.Array:
    """x one step earlier, in the state dtype; `initial` (or zero) at the first step."""
    axis, state = recurrence.axis, recurrence.state
    x = convert(x, state)
    if recurrence.length == 0:
        return x
    shift = (-1, 1, 0) if recurrence.reverse else (1, -1, 0)
    padding = [shift if k == axis else (0, 0, 0) for k in range(x.ndim)]
    x = lax.pad(x, jnp.zeros((), state), padding)
    if initial is None:
        return x
    return jnp.where(_first(recurrence, x.ndim), convert(initial, state), x)
