"""What a run of steps is as a whole, and after how many of its steps a state is forgotten.

The steps of a shard are the map s -> A s + H from the state before them to the one after them: A
the product of their factors, H what they make of zero. This is a primitive,

    linear_scan_summary    (a, b, reset?) -> A, H

Where the product of the last steps is so small that no finite state before them makes a difference,
A is zero and H is what these steps make of zero: what lies before them is not read. How many steps
that takes is looked for at a few lengths, the *prefixes*. On a GPU a kernel does all that without a
conditional of XLA's (cuda/summary.cu); elsewhere it is `lax` with conditionals.

The other way round, a state is forgotten within the *first* steps if the product of their factors
is below the smallest normal number, so that its derivatives have gone. The index of the first
prefix within which it is, or their number if there is none, is the *reach* of the state:

    linear_scan_reach      (a, most?) -> reach

where `most`, a number per channel, is what is known: it is no more than that. Each channel of the
factors has its own. Neither primitive has a derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

from jax_scan import _native, _primitives
from jax_scan._reference import Operands, Recurrence, full_shape, step_shape

# What a smaller factor counts as where derivatives may be nothing: a factor of zero makes a product
# zero whose derivative by this factor is not.
_LEAST = 1 / 16


def product(recurrence: Recurrence, operands: Operands) -> jax.Array:
    """The product of the factors, zero where there is a reset: the scan of zeros from one.

    It is taken in the order of the steps, so that it overflows no sooner than a state of one does.
    """
    given = {name: operands[name] for name in ("a", "reset") if name in operands}
    shape = (1,) * operands["a"].ndim
    one, zero = jnp.ones(shape, recurrence.state), jnp.zeros(shape, recurrence.state)
    return _primitives.last_state(recurrence, {**given, "b": zero, "h0": one})


def first_steps(
    recurrence: Recurrence, count: int, operands: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """The operands of the first steps; what is the same at all steps stays as it is."""
    axis, length = recurrence.axis, recurrence.length
    ends = (length - count, length) if recurrence.reverse else (0, count)
    return {
        name: lax.slice_in_dim(x, *ends, axis=axis) if x.shape[axis] == length else x
        for name, x in operands.items()
    }


def last_steps(
    recurrence: Recurrence, count: int, operands: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """The operands of the last steps, likewise."""
    return first_steps(recurrence._replace(reverse=not recurrence.reverse), count, operands)


def _vanishes(
    recurrence: Recurrence,
    operands: Mapping[str, jax.Array],
    count: int,
    log2_bound: int,
    least: float = 0,
) -> jax.Array:
    """Whether the product of the factors of `count` steps is below a bound, by its logarithm.

    In whatever order that is summed, it neither overflows nor ends among the subnormal numbers.
    Smaller factors than `least` count as that. Where the factors above 1 alone have a product above
    the square root of the largest number, nothing vanishes, and neither does a NaN.
    """
    axis, real = recurrence.axis, jnp.finfo(recurrence.state)
    size = jnp.abs(operands["a"]).astype(real.dtype)
    if "reset" in operands:
        size = jnp.where(operands["reset"], jnp.zeros((), real.dtype), size)
    times = count if size.shape[axis] == 1 else 1
    # In one pass over the factors.
    total, growth = lax.reduce(
        tuple(times * jnp.log(jnp.maximum(size, x)) for x in (least, 1)),
        (np.zeros((), real.dtype),) * 2,
        lambda x, y: (x[0] + y[0], x[1] + y[1]),
        (axis,),
    )
    found = (total < log2_bound * math.log(2)) & (growth < math.log(real.max) / 2)
    return jnp.expand_dims(found, axis)


def _new(name: str, abstract_eval: Callable[..., Any], lowering: Callable[..., Any]) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, mlir.lower_fun(lowering, multiple_results=True))
    return primitive


# ---- Summary -------------------------------------------------------------------------------------


def summary(
    recurrence: Recurrence, prefixes: tuple[int, ...] | None, operands: Operands
) -> list[jax.Array]:
    """A and H, which have one step and the other axes of the full shape.

    With None for the prefixes all steps are read, by primitives that XLA can split over devices.
    """
    named = {name: operands[name] for name in ("a", "b", "reset") if name in operands}
    if prefixes is None:
        return _whole(recurrence, named)
    args = _primitives.equally_varying(list(named.values()))
    return _SUMMARY.bind(*args, recurrence=recurrence, prefixes=prefixes)


def _named(args: Sequence[jax.Array]) -> dict[str, jax.Array]:
    return dict(zip(("a", "b", "reset"), args, strict=False))


def _step_of(recurrence: Recurrence, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return step_shape(full_shape(recurrence, shapes), recurrence.axis)


def _summary_abstract_eval(*avals, recurrence: Recurrence, **_):
    shape = _step_of(recurrence, [x.shape for x in avals])
    return [avals[0].update(shape=shape, dtype=recurrence.state, weak_type=False)] * 2


def _from_zero(recurrence: Recurrence, operands: Operands) -> jax.Array:
    """H."""
    shape = _step_of(recurrence, [x.shape for x in operands.values()])
    zero = jnp.zeros((1,) * len(shape), recurrence.state)
    found = _primitives.last_state(recurrence._replace(has_h0=True), {**operands, "h0": zero})
    return jnp.broadcast_to(found, shape)


def _whole(recurrence: Recurrence, operands: Operands) -> list[jax.Array]:
    """From all steps."""
    result = _from_zero(recurrence, operands)
    found = product(recurrence._replace(has_h0=True), operands)
    return _primitives.equally_varying([jnp.broadcast_to(found, result.shape), result])


def _summary_with_lax(
    *args: jax.Array, recurrence: Recurrence, prefixes: tuple[int, ...]
) -> list[jax.Array]:
    """All channels decide together."""
    operands = _named(args)
    info = np.finfo(recurrence.state)
    # The largest state times the product is below half of the smallest subnormal number.
    bound = info.minexp - info.nmant - info.maxexp - 1

    def look(left: tuple[int, ...]) -> list[jax.Array]:
        if not left:
            return _whole(recurrence, operands)
        count, *longer = left
        last = last_steps(recurrence, count, operands)
        factors = {name: x for name, x in last.items() if name != "b"}

        def short() -> list[jax.Array]:
            result = _from_zero(recurrence._replace(length=count), last)
            return _primitives.equally_varying([jnp.zeros_like(result), result])

        vanishes = jnp.all(_vanishes(recurrence, factors, count, bound))
        return lax.cond(vanishes, short, lambda: look(tuple(longer)))

    return look(prefixes)


def _summary_with_kernel(
    *args: jax.Array, recurrence: Recurrence, prefixes: tuple[int, ...]
) -> list[jax.Array]:
    full = full_shape(recurrence, [x.shape for x in args])
    return summary_call(
        args, full, recurrence.state, recurrence.axis, prefixes, descending=recurrence.reverse
    ) or _summary_with_lax(*args, recurrence=recurrence, prefixes=prefixes)


def _batch(primitive, args, dims, *, recurrence: Recurrence, **params):
    """The mapped axis becomes the first one."""
    args = [
        lax.expand_dims(x, (0,)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    recurrence = recurrence._replace(axis=recurrence.axis + 1)
    args = _primitives.equally_varying(args)
    outs = primitive.bind(*args, recurrence=recurrence, **params)
    return outs, [0] * len(outs)


_SUMMARY = _new("linear_scan_summary", _summary_abstract_eval, _summary_with_lax)
batching.primitive_batchers[_SUMMARY] = partial(_batch, _SUMMARY)
mlir.register_lowering(
    _SUMMARY, mlir.lower_fun(_summary_with_kernel, multiple_results=True), platform="cuda"
)


# ---- The kernel ----------------------------------------------------------------------------------


def summary_call(
    args: Sequence[jax.Array],
    full: tuple[int, ...],
    state: np.dtype,
    axis: int,
    prefixes: tuple[int, ...],
    *,
    descending: bool,
    is_cotangent: bool = False,
) -> list[jax.Array] | None:
    """A and H from a, b (or g) and reset, in code for CUDA; None where there is no kernel.

    With `is_cotangent` H is what steps s -> a (g + s) make of zero. `descending` says which way the
    walk is.
    """
    a, x, *_ = args
    complex_state = np.issubdtype(state, np.complexfloating)
    if 0 in full or np.issubdtype(x.dtype, np.complexfloating) != complex_state:
        return None
    if max(y.shape[axis] for y in args) < full[axis]:
        return None
    sizes = math.prod(full[:axis]), full[axis], math.prod(full[axis + 1 :])
    count = _native.module("cuda").summary_workspace_bytes(
        *sizes, a.dtype.name, x.dtype.name, len(prefixes)
    )
    if count is None:
        return None
    return _call.bind(
        *_primitives.equally_varying(list(args)),
        shape=step_shape(full, axis),
        state=state,
        workspace=count,
        attributes=(
            ("is_cotangent", is_cotangent),
            ("axis", axis),
            ("descending", descending),
            ("prefixes", prefixes),
        ),
    )[:2]


# The custom call itself. It exists in lowered code only, so it needs no other rules.
_call = Primitive("linear_scan_summary_call")
_call.multiple_results = True


@_call.def_abstract_eval
def _(a, *_, shape, state, workspace, **params):
    results = (shape, state), (shape, state), ((workspace,), np.uint8)
    return [a.update(shape=shape, dtype=dtype, weak_type=False) for shape, dtype in results]


def _call_lowering(ctx: mlir.LoweringRuleContext, *args: Any, attributes, **_: Any) -> Any:
    given = dict(attributes)
    given["prefixes"] = np.asarray(given["prefixes"], np.int64)
    lowering = jax.ffi.ffi_lowering(_native.SUMMARY)
    return lowering(ctx, *args, **given)


mlir.register_lowering(_call, _call_lowering)


# ---- Reach ---------------------------------------------------------------------------------------


def reach(recurrence: Recurrence, prefixes: tuple[int, ...], operands: Operands) -> jax.Array:
    """The reach of the state before the first step, by factors and resets; in int32.

    It has one step, and the other axes of `a`, of `reset` or of both.
    """
    a, reset, last = operands["a"], operands.get("reset"), np.int32(len(prefixes))
    if reset is None:
        return _REACH.bind(a, recurrence=recurrence, prefixes=prefixes)[0]
    by_resets = jnp.full((1,) * a.ndim, last)
    for index in reversed(range(last)):
        first = first_steps(recurrence, prefixes[index], {"reset": reset})["reset"]
        within = jnp.any(first, recurrence.axis, keepdims=True)
        by_resets = jnp.where(within, np.int32(index), by_resets)
    shape = step_shape(a.shape, recurrence.axis)
    others = tuple(k for k, n in enumerate(shape) if n == 1)
    most = jnp.broadcast_to(jnp.max(by_resets, others, keepdims=True, initial=0), shape)
    args = _primitives.equally_varying([a, most])
    by_factors = _REACH.bind(*args, recurrence=recurrence, prefixes=prefixes)[0]
    return jnp.minimum(by_factors, by_resets)


def _reach_abstract_eval(a, *_, recurrence: Recurrence, **params):
    shape = step_shape(a.shape, recurrence.axis)
    return [a.update(shape=shape, dtype=np.dtype(np.int32), weak_type=False)]


def _reach_with_lax(
    a: jax.Array, *most: jax.Array, recurrence: Recurrence, prefixes: tuple[int, ...]
) -> list[jax.Array]:
    last, log2_tiny = len(prefixes), np.finfo(recurrence.state).minexp

    def look(index: int, reach: jax.Array) -> jax.Array:
        if index == last:
            return reach
        count = prefixes[index]
        first = first_steps(recurrence, count, {"a": a})
        vanishes = _vanishes(recurrence, first, count, log2_tiny, _LEAST)
        reach = jnp.where(vanishes, jnp.minimum(reach, index), reach)
        return lax.cond(
            jnp.all(reach <= index), lambda reach: reach, partial(look, index + 1), reach
        )

    known = most[0] if most else jnp.full(step_shape(a.shape, recurrence.axis), last, np.int32)
    return [look(0, _primitives.equally_varying([known, a])[0])]


def _batch_reach(args, dims, **params):
    """Where `a` is not mapped, the largest `most` is for all."""
    a, *most = args
    dim, *others = dims
    if dim is None:
        most = [jnp.max(x, d, initial=0) for x, d in zip(most, others, strict=True)]
        return _REACH.bind(a, *most, **params), [None]
    size = a.shape[dim]
    most = [
        jnp.broadcast_to(lax.expand_dims(x, (0,)), (size, *x.shape)) if d is None else x
        for x, d in zip(most, others, strict=True)
    ]
    return _batch(_REACH, (a, *most), (dim, *(d or 0 for d in others)), **params)


_REACH = _new("linear_scan_reach", _reach_abstract_eval, _reach_with_lax)
batching.primitive_batchers[_REACH] = _batch_reach
