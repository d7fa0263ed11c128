"""The product of a scan's factors, and after how many steps it is nothing.

A state is forgotten within the first steps if the product of their factors is below the smallest
normal number. After how many is looked for at a few lengths, the *prefixes*: the *reach* of a state
is the index of the first one within which it is forgotten, and their number if there is none. Each
channel of the factors has its own. The product of a channel whose state is forgotten is zero: so it
is from the prefix on, unless what follows is not finite or grows without bounds.

    linear_scan_product    (a, most?) -> product, reach

`most`, a number per channel, is what is known of the reach: it is no more than that. On a GPU a
kernel reads no more of a channel than what decides, or else all of it, and no conditional of XLA's
is needed. Elsewhere it is `lax` with conditionals, and the product is the scan of zeros from one.
The primitive has no derivative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

from jax_scan import _native, _primitives
from jax_scan._reference import Operands, Recurrence, convert, step_shape

# What a smaller factor counts as where a product may be nothing: a factor of zero makes a product
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


class Reach(NamedTuple):
    """The reach by the product of the factors, and by resets alone; in int32."""

    by_factors: jax.Array
    by_resets: jax.Array

    @property
    def least(self) -> jax.Array:
        """Whichever is less: that is how far derivatives reach."""
        return jnp.minimum(*self)


def product_and_reach(
    recurrence: Recurrence, prefixes: tuple[int, ...], operands: Operands
) -> tuple[jax.Array, Reach]:
    """The product of all factors, zero where there is a reset, and the reach.

    They have one step, and the other axes of `a`, of `reset` or of both.
    """
    a, reset = operands["a"], operands.get("reset")
    axis, state, last = recurrence.axis, recurrence.state, np.int32(len(prefixes))
    if not prefixes:
        found = product(recurrence, operands)
        none = (0 * found.real).astype(np.int32)
        return found, Reach(none, none)
    real = not jnp.issubdtype(a.dtype, jnp.complexfloating)
    own = jnp.finfo(state).dtype if real else state
    args, whole = [a], None
    by_resets = jnp.full((1,) * a.ndim, last)
    if reset is not None:
        for index in reversed(range(last)):
            first = first_steps(recurrence, prefixes[index], {"reset": reset})["reset"]
            within = jnp.any(first, axis, keepdims=True)
            by_resets = jnp.where(within, np.int32(index), by_resets)
        whole = jnp.any(reset, axis, keepdims=True)
        shape = step_shape(a.shape, axis)
        others = tuple(k for k, n in enumerate(shape) if n == 1)
        args.append(jnp.broadcast_to(jnp.max(by_resets, others, keepdims=True, initial=0), shape))
    found, by_factors = _PRODUCT.bind(
        *_primitives.equally_varying(args),
        recurrence=recurrence._replace(state=np.dtype(own)),
        prefixes=prefixes,
    )
    found = convert(found, state)
    if whole is not None:
        found = jnp.where(whole, jnp.zeros((), state), found)
    return found, Reach(by_factors, by_resets)


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


_PRODUCT = Primitive("linear_scan_product")
_PRODUCT.multiple_results = True
_PRODUCT.def_impl(partial(xla.apply_primitive, _PRODUCT))


@_PRODUCT.def_abstract_eval
def _(a, *_, recurrence: Recurrence, **params):
    shape = step_shape(a.shape, recurrence.axis)
    return [a.update(shape=shape, dtype=t, weak_type=False) for t in (recurrence.state, np.int32)]


def _batch(args: Sequence[Any], dims: Sequence[Any], *, recurrence: Recurrence, **params: Any):
    """The mapped axis becomes the first one. Where `a` has none, the largest `most` is for all."""
    a, *most = args
    dim, *others = dims
    params["recurrence"] = recurrence
    if dim is None:
        most = [jnp.max(x, d, initial=0) for x, d in zip(most, others, strict=True)]
        return _PRODUCT.bind(a, *most, **params), [None, None]
    a = jnp.moveaxis(a, dim, 0)
    shape = step_shape(a.shape, recurrence.axis + 1)
    most = [
        jnp.broadcast_to(x if d is None else jnp.moveaxis(x, d, 0), shape)
        for x, d in zip(most, others, strict=True)
    ]
    params["recurrence"] = recurrence._replace(axis=recurrence.axis + 1)
    return _PRODUCT.bind(*_primitives.equally_varying([a, *most]), **params), [0, 0]


batching.primitive_batchers[_PRODUCT] = _batch


# ---- In lax --------------------------------------------------------------------------------------


def _with_lax(
    a: jax.Array, *most: jax.Array, recurrence: Recurrence, prefixes: tuple[int, ...]
) -> list[jax.Array]:
    """A product has gone when the sum of its logarithms says so.

    In whatever order it is summed, it neither overflows nor ends among the subnormal numbers. Small
    factors count as _LEAST each, so that a product without a few of them is still nothing: the
    derivatives of the product by so many factors are then zero too.
    """
    axis, state, last = recurrence.axis, jnp.finfo(recurrence.state), len(prefixes)

    def forgets(count):
        size = jnp.abs(first_steps(recurrence, count, {"a": a})["a"]).astype(state.dtype)
        times = count if size.shape[axis] == 1 else 1
        # In one pass over the factors: the logarithm of their product, and of those above 1.
        total, growth = lax.reduce(
            tuple(times * jnp.log(jnp.maximum(size, least)) for least in (_LEAST, 1)),
            (np.zeros((), state.dtype),) * 2,
            lambda x, y: (x[0] + y[0], x[1] + y[1]),
            (axis,),
        )
        found = (total < math.log(state.tiny)) & (growth < math.log(state.max) / 2)
        return jnp.expand_dims(found, axis)

    def look(index, reach):
        if index == last:
            zero = jnp.zeros((), recurrence.state)
            found = jnp.where(reach < last, zero, product(recurrence, {"a": a}))
            # The product of no channels is a constant: it varies over no axis of a mesh.
            return _primitives.equally_varying([found, reach])
        reach = jnp.where(forgets(prefixes[index]), jnp.minimum(reach, index), reach)
        # What passes through a conditional costs nothing, what is made there costs a kernel.
        nothing = (0 * reach).astype(recurrence.state)
        return lax.cond(
            jnp.all(reach <= index),
            lambda nothing, reach: [nothing, reach],
            lambda _, reach: look(index + 1, reach),
            nothing,
            reach,
        )

    known = most[0] if most else jnp.full(step_shape(a.shape, axis), last, np.int32)
    return look(0, _primitives.equally_varying([known, a])[0])


# ---- The kernel ----------------------------------------------------------------------------------


def _with_kernel(
    a: jax.Array, *most: jax.Array, recurrence: Recurrence, prefixes: tuple[int, ...]
) -> list[jax.Array]:
    axis = recurrence.axis
    if a.shape[axis] < recurrence.length or not a.size:
        return _with_lax(a, *most, recurrence=recurrence, prefixes=prefixes)
    sizes = math.prod(a.shape[:axis]), a.shape[axis], math.prod(a.shape[axis + 1 :])
    count = _native.module("cuda").product_workspace_bytes(*sizes, a.dtype.name, len(prefixes))
    return _call.bind(a, *most, recurrence=recurrence, prefixes=prefixes, workspace=count)[:2]


# The custom call itself. It exists in lowered code only, so it needs no other rules.
_call = Primitive("linear_scan_product_call")
_call.multiple_results = True


@_call.def_abstract_eval
def _(a, *_, recurrence: Recurrence, workspace: int, **params):
    step = step_shape(a.shape, recurrence.axis)
    results = (step, recurrence.state), (step, np.int32), ((workspace,), np.uint8)
    return [a.update(shape=shape, dtype=dtype, weak_type=False) for shape, dtype in results]


def _call_lowering(
    ctx: mlir.LoweringRuleContext, *args: Any, recurrence, prefixes, **_: Any
) -> Any:
    return jax.ffi.ffi_lowering(_native.PRODUCT)(
        ctx,
        *args,
        axis=recurrence.axis,
        reverse=recurrence.reverse,
        least=np.float32(math.log2(_LEAST)),
        prefixes=np.asarray(prefixes, np.int64),
    )


mlir.register_lowering(_call, _call_lowering)
mlir.register_lowering(_PRODUCT, mlir.lower_fun(_with_lax, multiple_results=True))
mlir.register_lowering(
    _PRODUCT, mlir.lower_fun(_with_kernel, multiple_results=True), platform="cuda"
)
