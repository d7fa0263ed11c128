"""Scans whose time axis is split over devices.

Each device holds a run of consecutive steps, its *shard*. The shard's steps together are the map

    s -> A s + H,   A the product of its factors, H its last state when it starts from zero,

and a shard starts from what the shards before it make of h0. So a call is: A and H of the own
shard, one exchange of both, the maps of all shards before the own one applied in their order, and
the scan of the own shard from there.

The derivative is not that of these steps, which would run through the shard for A, for H and for h.
The tangent of the whole scan is a scan with the same factors,

    dh = scan(a, da h_prev + db, dh0)  =  scan(a, da h_prev + db, 0)  +  scan(a, 0, ds)

on each shard, where ds comes from the exchanged last states of the first term and the same A. It is
written as this sum because of its transpose: the cotangent of the second term is the summary of
the shard that the other shards need, and only then, from what they answer, the cotangent of the
first term gives da and db in one pass. Higher derivatives are those of these formulas.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike
from numpy.typing import DTypeLike

from jax_scan import _api, _compat, _primitives
from jax_scan._reference import Operands, Recurrence, full_shape, step_shape

AxisName = str | tuple[str, ...]

# Steps of the loop over shards that one kernel of XLA's does.
_UNROLL = 32


@overload
def sequence_parallel_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    axis_name: AxisName,
    mesh: Mesh | AbstractMesh | None = None,
    axis: int = -2,
    reverse: bool = False,
    reset: ArrayLike | None = None,
    return_state: Literal[False] = False,
    out_dtype: DTypeLike | None = None,
) -> jax.Array: ...
@overload
def sequence_parallel_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    axis_name: AxisName,
    mesh: Mesh | AbstractMesh | None = None,
    axis: int = -2,
    reverse: bool = False,
    reset: ArrayLike | None = None,
    return_state: Literal[True],
    out_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def sequence_parallel_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    axis_name: AxisName,
    mesh: Mesh | AbstractMesh | None = None,
    axis: int = -2,
    reverse: bool = False,
    reset: ArrayLike | None = None,
    return_state: bool = False,
    out_dtype: DTypeLike | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`linear_scan` of arrays whose time axis is sharded over devices.

    Inside `jax.shard_map` over `axis_name` it takes what a device holds: of a, b and reset its
    steps, of h0 all. Elsewhere give the mesh too: then the arguments are whole arrays, and only
    time is split by hand; how other axes are sharded stays as it is.

        h = sequence_parallel_scan(a, b, axis_name="t", mesh=mesh)
        f = jax.shard_map(partial(sequence_parallel_scan, axis_name="t"), mesh=mesh,
                          in_specs=(P("x", "t"), P("x", "t")), out_specs=P("x", "t"))

    Value and derivatives are those of `linear_scan`, of any order and in both modes, with two
    differences. Where there is no `h0` the first factor is read: it may be anything finite. And a
    state that is not zero passes through a shard as A s + H, where A is the product of the shard's
    factors: if that overflows, so does what follows.

    Cost: with n devices, per channel (each index of the axes besides time) n pairs (A, H) are
    gathered for the value, n numbers are summed and scattered for the gradient, and there is an
    all-reduce of one for each of h0's gradient and a returned state. That is all communication,
    however long the sequence is. Each device reads a three times and b twice and writes h once, and
    for the gradient reads a, h and the cotangent once, a and the cotangent once more, and writes
    the gradients of a and b once: 13 passes over its share where `linear_scan` has 8. A forward-mode
    derivative reads and writes ten arrays, not five. Then there are n steps over one value per
    channel, which are not split.

    Args:
        a: As in `linear_scan`; if its time axis has size 1 or is missing, the same on all devices.
        b: As in `linear_scan`.
        h0: As in `linear_scan`, the same on all devices: the state before the first step of all.
        axis_name: The mesh axis over which time is split, or a tuple of such, major axis first. Inside
            `jax.shard_map` one of those that it splits by hand.
        mesh: The mesh, where the function is not called inside `jax.shard_map`.
        axis: As in `linear_scan`.
        reverse: As in `linear_scan`: then the last device starts.
        reset: As in `linear_scan`.
        return_state: Also return the state after the last step of all, the same on all devices.
        out_dtype: As in `linear_scan`.

    Returns:
        h, sharded over time like b, or the pair of h and the last state.

    Raises:
        TypeError: As `linear_scan`; or `axis_name` or `mesh` is of the wrong kind.
        ValueError: As `linear_scan`; or `axis_name` is not an axis of the mesh, or not one over
            which a `jax.shard_map` around the call splits its arguments by hand; or the time axis
            does not divide over the devices.
    """
    names = _names(axis_name)
    if mesh is None:
        _check_inside(names)
        scan = partial(_scan, axis_name=names)
    else:
        _check_mesh(mesh, names)
        scan = partial(_scan_over, mesh=mesh, axis_name=names)
    return _api.checked(scan, a, b, h0, axis, reverse, reset, return_state, out_dtype)


def _names(axis_name: Any) -> tuple[str, ...]:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"axis_name must be the name of a mesh axis or a tuple of names, got {axis_name!r}"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name has a mesh axis twice: {axis_name!r}")
    return names


def _check_inside(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"axis_name {name!r} is not a mesh axis over which a jax.shard_map around this call "
                "splits its arguments; elsewhere give the mesh too"
            ) from None


def _check_mesh(mesh: Any, names: tuple[str, ...]) -> None:
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"mesh must be a jax.sharding.Mesh or AbstractMesh, got {mesh!r}")
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(f"axis_name {name!r} is none of the mesh's axes, {mesh.axis_names}")
    manual = set(names) & set(jax.sharding.get_abstract_mesh().manual_axes)
    if manual:
        raise ValueError(
            f"mesh must not be given where jax.shard_map has split axis {manual.pop()!r} already"
        )


def _scan_over(
    recurrence: Recurrence,
    operands: Operands,
    dtype: Any,
    with_state: bool,
    *,
    mesh: Mesh | AbstractMesh,
    axis_name: tuple[str, ...],
) -> tuple[jax.Array, jax.Array | None]:
    """`_scan` of whole arrays."""
    count = math.prod(mesh.shape[name] for name in axis_name)
    axis, length = recurrence.axis, recurrence.length
    if length % count:
        raise ValueError(
            f"the time axis of b has size {length}, which does not divide over the {count} devices "
            f"of axis_name {axis_name if len(axis_name) > 1 else axis_name[0]!r}"
        )
    split = PartitionSpec(*[None] * axis, axis_name)
    specs = tuple((k, split if x.shape[axis] == length > 1 else PartitionSpec()) for k, x in operands.items())
    local = recurrence._replace(length=length // count)
    return _mapped(mesh, axis_name, local, np.dtype(dtype), with_state, specs, split)(dict(operands))


@functools.lru_cache(maxsize=256)
def _mapped(mesh, axis_name, recurrence, dtype, with_state, specs, split):
    """One function for equal arguments, so that JAX compiles it once."""

    def local(operands):
        return _scan(recurrence, operands, dtype, with_state, axis_name=axis_name)

    out_specs = (split, PartitionSpec() if with_state else None)
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(dict(specs),),
            out_specs=out_specs,
            axis_names=set(axis_name),
        )
    )


def _scan(
    recurrence: Recurrence,
    operands: Operands,
    dtype: Any,
    with_state: bool,
    *,
    axis_name: tuple[str, ...],
) -> tuple[jax.Array, jax.Array | None]:
    """h of the own shard, and the last state of all."""
    full = full_shape(recurrence, [x.shape for x in operands.values()])
    step = step_shape(full, recurrence.axis)
    index, count = lax.axis_index(axis_name), lax.axis_size(axis_name)
    h0 = operands.get("h0", np.zeros((), recurrence.state))
    given = _vary_alike({**operands, "h0": jnp.broadcast_to(h0, step), "index": index})
    del given["index"]
    h, last, _, _ = _shard(recurrence._replace(has_h0=True), dtype, axis_name, given)
    if not with_state:
        return h, None
    ours = index == (0 if recurrence.reverse else count - 1)
    return h, lax.psum(jnp.where(ours, last, jnp.zeros_like(last)), axis_name)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _shard(
    recurrence: Recurrence, dtype: Any, axis_name: tuple[str, ...], operands: dict[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """h and the last state of the own shard, the state before it, and A of all shards."""
    step = operands["h0"].shape
    zero = _like(operands["h0"], 0)
    product = jnp.broadcast_to(_product(recurrence, operands), step)
    state = _primitives.last_state(recurrence, {**operands, "h0": zero})
    maps = lax.all_gather(jnp.stack([product, state]), axis_name)
    products, states = maps[:, 0], maps[:, 1]

    before = _before(recurrence, axis_name, operands["h0"], states, products)
    h, last = _primitives.scan(recurrence, {**operands, "h0": before}, dtype, True)
    return h, last, before, products


def _shard_jvp(recurrence, dtype, axis_name, primals, tangents):
    """dh = tangent(a, h, s; da, db, 0) + tangent(a; ds), see above."""
    (operands,), (dots,) = primals, tangents
    outs = _shard(recurrence, dtype, axis_name, operands)
    h, last, before, products = outs
    dots = {f"d{k}": t for k, t in dots.items() if k != "reset" and not isinstance(t, SymbolicZero)}
    initial = dots.pop("dh0", _like(before, 0))
    shared = {name: operands[name] for name in ("a", "reset") if name in operands}

    dh, dlast, dstates = _like(h, 0), _like(last, 0), _like(products, 0)
    if dots:
        primal = {"h": h, "h0": before} if "da" in dots else {}
        dh, dlast = _primitives.tangent(recurrence, shared | primal | dots, dtype, True)
        dh, dlast = jnp.broadcast_to(dh, h.shape), jnp.broadcast_to(dlast, last.shape)
        dstates = lax.all_gather(dlast, axis_name)

    # A product that has overflowed must not make NaN of a tangent that is zero.
    finite = jnp.nan_to_num(products)

    dbefore = _tangent_before(recurrence, axis_name, initial, dstates, finite)
    dh2, dlast2 = _primitives.tangent(recurrence, shared | {"dh0": dbefore}, dtype, True)

    # Only a derivative of the derivative reads that of A.
    dproducts = _like(products, 0)
    if "da" in dots:
        product = partial(_product, recurrence)
        a = {"a": operands["a"]}
        rest = {k: x for k, x in shared.items() if k != "a"}
        _, dproduct = jax.jvp(lambda a: product(rest | a), (a,), ({"a": dots["da"]},))
        dproducts = lax.all_gather(jnp.broadcast_to(dproduct, before.shape), axis_name)
    return outs, (dh + dh2, dlast + dlast2, dbefore, dproducts)


_shard.defjvp(_shard_jvp, symbolic_zeros=True)


def _product(recurrence: Recurrence, operands: Mapping[str, jax.Array]) -> jax.Array:
    """The product of the factors, zero where there is a reset: the scan of zeros from one.

    It is taken in the order of the steps, so that it overflows no sooner than a state of one does.
    """
    given = {name: operands[name] for name in ("a", "reset") if name in operands}
    shape = (1,) * operands["a"].ndim
    one, zero = jnp.ones(shape, recurrence.state), jnp.zeros(shape, recurrence.state)
    return _primitives.last_state(recurrence, {**given, "b": zero, "h0": one})


def _before(recurrence, axis_name, first, states, products) -> jax.Array:
    """The state before the own shard: `first` after the maps of all shards before it, in order."""

    def follow(s, shard):
        state, product = shard
        # What starts from zero ends in H, whatever has become of the product of the factors.
        return jnp.where(s == 0, state, product * s + state), s

    count = len(states)
    _, every = lax.scan(
        follow, first, (states, products), reverse=recurrence.reverse, unroll=min(count, _UNROLL)
    )
    return lax.dynamic_index_in_dim(every, lax.axis_index(axis_name), keepdims=False)


def _tangent_before(recurrence, axis_name, first, states, products) -> jax.Array:
    """The same for tangents, linear in `first` and `states`: a scan over the shards."""
    shards = Recurrence(0, len(states), recurrence.reverse, True, recurrence.state)
    operands = {"a": products, "b": states, "h0": first[None]}
    after, _ = _primitives.scan(shards, operands, recurrence.state)
    index, reverse = lax.axis_index(axis_name), recurrence.reverse
    last = jnp.clip(index + (1 if reverse else -1), 0, len(states) - 1)
    ours = lax.dynamic_index_in_dim(after, last, keepdims=False)
    return jnp.where(index == (len(states) - 1 if reverse else 0), first, ours)


def _like(x: jax.Array, value: float) -> jax.Array:
    """A constant like `x`, which varies over the same manual axes."""
    return _vary_alike({"x": x, "new": jnp.full(x.shape, value, x.dtype)})["new"]


def _vary_alike(values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Marks all values as varying over the manual axes over which any of them varies."""
    axes = {name: _compat.varying_axes(jax.typeof(x)) for name, x in values.items()}
    union = frozenset().union(*axes.values())
    return {
        name: _compat.as_varying(x, tuple(union - axes[name])) if union - axes[name] else x
        for name, x in values.items()
    }
