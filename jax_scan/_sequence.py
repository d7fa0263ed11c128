"""Scans whose time axis is split over devices.

Each device holds a run of consecutive steps, its *shard*. The shard's steps together are the map

    s -> A s + H,   A the product of its factors, H its last state when it starts from zero,

and a shard starts from what the shards before it make of h0. So a call is: A and H of the own
shard (see _summary.py), for which its last steps do where these forget what is before them; one
exchange of both; the maps of all shards before the own one applied in their order; and the scan of
the own shard from there.

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
from typing import Any, Literal, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from numpy.typing import DTypeLike

from jax_scan import _api, _compat, _primitives
from jax_scan._reference import Operands, Recurrence, Result, full_shape, step_shape
from jax_scan._summary import first_steps, product, reach, summary, summary_call

AxisName = str | tuple[str, ...]
Pair = tuple[jax.Array, jax.Array]

# The fewest steps within which to look whether a shard forgets what was before them, how many times
# more each further look takes, and which part of all steps is the most. Fewer steps than the first
# would hardly be faster on a GPU.
_PREFIX = 1024
_RATIO = 4
_PARTS = 8
# Steps of the loop over shards that XLA makes one kernel of.
_UNROLL = 32
# The most devices among which all maps are gathered, see below. By estimate: a gather takes 15 us
# and a send 10 us, and the bytes of 16 maps of 16 k channels are 5 us of NVLink.
_GATHERED = 16


@overload
def sequence_parallel_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    axis_name: AxisName | None = None,
    sharding: NamedSharding | None = None,
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
    axis_name: AxisName | None = None,
    sharding: NamedSharding | None = None,
    axis: int = -2,
    reverse: bool = False,
    reset: ArrayLike | None = None,
    return_state: Literal[True],
    out_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def sequence_parallel_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    axis_name: AxisName | None = None,
    sharding: NamedSharding | None = None,
    axis: int = -2,
    reverse: bool = False,
    reset: ArrayLike | None = None,
    return_state: bool,
    out_dtype: DTypeLike | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def sequence_parallel_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    axis_name: AxisName | None = None,
    sharding: NamedSharding | None = None,
    axis: int = -2,
    reverse: bool = False,
    reset: ArrayLike | None = None,
    return_state: bool = False,
    out_dtype: DTypeLike | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`linear_scan` of arrays whose time axis is sharded over devices.

    Inside `jax.shard_map` give `axis_name`. The arguments are then what a device holds: of a, b and
    reset its own steps, of h0 all. Elsewhere, in `jax.jit` or not, give b's `sharding`. The
    arguments are then whole arrays, and the call does its own `jax.shard_map`.

        f = partial(sequence_parallel_scan, axis_name="time")
        h = jax.shard_map(f, mesh=mesh, in_specs=P(None, "time"), out_specs=P(None, "time"))(a, b)
        h = sequence_parallel_scan(a, b, sharding=NamedSharding(mesh, P(None, "time")))

    Value and derivatives are those of `linear_scan`, of any order and in both modes, up to
    rounding, with four exceptions. Over several devices and without `h0` the first factor is read;
    it must be finite. A state that is not zero passes a device's steps as A s + H, where A is the
    product of their factors and H what they make of zero: where A overflows, so does the result,
    where it underflows, a state counts as nothing, and an infinite state may become a NaN. A state
    that overflows inside of these steps is infinite there alone if A s + H is finite. And what is
    not finite does not pass a device's steps if A has underflowed: after a NaN or an infinity h is,
    on the device that it is on, what it is in `linear_scan`, and on the devices after that as if
    there had been none.

    Cost: the value takes one all-gather of A and H, two numbers per channel (index of all axes but
    time) and device, the gradient one reduce-scatter of one number per channel and device. Over
    more than 16 devices it is instead a send of A and H for each time that their number doubles and
    one of the state, and as many sends of one number per channel for the gradient. The gradient of
    h0 and a returned state take an all-reduce of one number per channel each; with `reset` three
    numbers take the place of two. No communication grows with the length.

    What a device reads and writes depends on how far states reach. It looks for that within the
    last 1024, 4096, 16384, ... of its steps, up to an eighth of them. Where no finite state before
    these can make a difference, as the product of their factors is zero, by underflow or a reset
    and in all channels, the value moves the 3 arrays of `linear_scan` and 2 of those last steps;
    else 5 arrays. The gradient likewise moves the 5 arrays of `linear_scan` and 2 of the first
    steps, or else 7. Without a kernel for that (on CPUs, for a real `a` with complex `b`, or where
    XLA splits other axes of a `jax.shard_map` by itself) it is 3 in place of 2 and 6 in place of 5.
    A tangent moves 9 or 10 instead of 5.
    Under `jax.vmap` all mapped scans are treated like the one that reaches furthest.

    Args:
        a: As in `linear_scan`. With a time axis of size 1, or none, it is the same on all devices.
        b: As in `linear_scan`.
        h0: As in `linear_scan`: the state before the first step of the first device.
        axis_name: The mesh axis over which time is split, or a tuple of them, the major axis first.
            `jax.shard_map` must have split the arguments over it.
        sharding: How b is sharded: a `jax.sharding.NamedSharding` that splits the time axis. Other
            arguments are split in the same way in the axes that they have. An array that is sharded
            otherwise is moved first.
        axis: As in `linear_scan`.
        reverse: As in `linear_scan`; the last device holds the first step.
        reset: As in `linear_scan`.
        return_state: Also return h after the last step of the last device.
        out_dtype: As in `linear_scan`.

    Returns:
        h, sharded like b. With `return_state` the pair of h and the last state, which is the same
        on all devices over which time is split.

    Raises:
        TypeError: As `linear_scan`; neither or both of `axis_name` and `sharding` are given, or one
            is of the wrong kind.
        ValueError: As `linear_scan`; `axis_name` is unknown here; `sharding` does not split time,
            does not fit b's rank, or has axes that do not divide over its devices.
    """
    scan: Any
    if (axis_name is None) == (sharding is None):
        raise TypeError("give either axis_name, inside jax.shard_map, or sharding, elsewhere")
    if axis_name is not None:
        scan = partial(_scan, axis_name=_bound(axis_name))
    else:
        scan = partial(_scan_whole, sharding=_named(sharding, b))
    return _api.checked(scan, a, b, h0, axis, reverse, reset, return_state, out_dtype)


def _bound(axis_name: Any) -> tuple[str, ...]:
    """`axis_name` as a tuple of axes over which the arguments are split."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"axis_name must be the name of a mesh axis or a tuple of them, got {axis_name!r}"
        )
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"axis_name {name!r} is not a mesh axis over which jax.shard_map has split the "
                "arguments; outside of it give sharding instead"
            ) from None
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name has an axis twice: {axis_name!r}")
    return names


def _named(sharding: Any, b: Any) -> NamedSharding:
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"sharding must be a jax.sharding.NamedSharding, got {sharding!r}")
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError("sharding can't be given inside jax.shard_map; give axis_name instead")
    names_no_devices = (
        isinstance(sharding.mesh, AbstractMesh)
        and AxisType.Auto in sharding.mesh.axis_types
        and jax.sharding.get_abstract_mesh().empty
    )
    if names_no_devices and not isinstance(b, Tracer):
        raise ValueError(
            "sharding is over an abstract mesh, which names no devices; outside of jax.jit it must "
            f"be over a jax.sharding.Mesh, got {sharding}"
        )
    return sharding


def _scan_whole(
    recurrence: Recurrence,
    operands: Operands,
    dtype: Any,
    with_state: bool,
    *,
    sharding: NamedSharding,
) -> tuple[jax.Array, jax.Array | None]:
    """`_scan` of whole arrays."""
    axis, full = recurrence.axis, operands["b"].shape
    mesh, spec = sharding.mesh, tuple(sharding.spec)
    if len(spec) > len(full):
        raise ValueError(f"sharding {sharding.spec} has more axes than b of shape {full}")
    spec = (*spec, *[None] * (len(full) - len(spec)))
    names = [() if s is None else s if isinstance(s, tuple) else (s,) for s in spec]
    if not names[axis]:
        raise ValueError(
            f"sharding {sharding.spec} does not split the time axis {axis} of b; linear_scan takes "
            "such arrays"
        )
    for k, (n, over) in enumerate(zip(full, names, strict=True)):
        count = math.prod(mesh.shape[name] for name in over)
        if n % count:
            what = "the time axis" if k == axis else f"axis {k}"
            raise ValueError(
                f"{what} of b has size {n}, which does not divide over the {count} devices of mesh "
                f"axis {spec[k]!r} in sharding"
            )

    def specs(x: jax.Array) -> PartitionSpec:
        return PartitionSpec(*(s if x.shape[k] == full[k] else None for k, s in enumerate(spec)))

    count = math.prod(mesh.shape[name] for name in names[axis])
    local = recurrence._replace(length=recurrence.length // count)
    in_specs = tuple((name, specs(x)) for name, x in operands.items())
    if AxisType.Explicit in mesh.axis_types:
        # What `jax.shard_map` does by itself for other axes.
        operands = {
            name: _compat.reshard(operands[name], NamedSharding(mesh, own))
            for name, own in in_specs
        }
    out_specs = [PartitionSpec(*spec)]
    if with_state:
        out_specs.append(PartitionSpec(*spec[:axis], None, *spec[axis + 1 :]))
    call = _mapped(mesh, names[axis], local, np.dtype(dtype), in_specs, tuple(out_specs))
    h, *last = call(dict(operands))
    return h, last[0] if with_state else None


@functools.lru_cache(maxsize=256)
def _mapped(
    mesh: Any,
    axis_name: tuple[str, ...],
    recurrence: Recurrence,
    dtype: np.dtype,
    in_specs: tuple[tuple[str, PartitionSpec], ...],
    out_specs: tuple[PartitionSpec, ...],
) -> Any:
    """One function for equal arguments, so that JAX compiles it once."""

    def local(operands):
        outs = _scan(recurrence, operands, dtype, len(out_specs) > 1, axis_name=axis_name)
        return outs[: len(out_specs)]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(dict(in_specs),), out_specs=out_specs)
    return jax.jit(mapped)


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
    index, count = lax.axis_index(axis_name), lax.axis_size(axis_name)
    given = {**operands, "index": index}
    if count > 1:
        h0 = operands.get("h0", np.zeros((), recurrence.state))
        h0 = jnp.broadcast_to(h0, step_shape(full, recurrence.axis))
        # So h0 is mapped where b is: else the sum that makes its gradient would be one of h's
        # cotangents, in h's dtype.
        given["h0"] = jnp.where(_never(recurrence, operands["b"]), jnp.zeros_like(h0), h0)
        recurrence = recurrence._replace(has_h0=True)
    given = _vary_alike(given)
    del given["index"]
    if count > 1:
        h, last, *_ = _shard(recurrence, _prefixes(recurrence), dtype, axis_name, given)
    else:
        h, last = cast(Pair, _primitives.scan(recurrence, given, dtype, with_state))
    if not with_state:
        return h, None
    ours = index == (0 if recurrence.reverse else count - 1)
    return h, lax.psum(jnp.where(ours, last, jnp.zeros_like(last)), axis_name)


def _never(recurrence: Recurrence, x: jax.Array) -> jax.Array:
    """False, but mapped by `jax.vmap` if x is. XLA does not see x in it."""
    nothing = lax.slice_in_dim(x, 0, 0, axis=recurrence.axis)
    return jnp.any(nothing != 0, axis=recurrence.axis, keepdims=True)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _shard(
    recurrence: Recurrence,
    prefixes: tuple[int, ...] | None,
    dtype: Any,
    axis_name: tuple[str, ...],
    operands: dict[str, jax.Array],
) -> tuple[jax.Array, ...]:
    """h and the last state of the own shard; then what the derivatives read.

    That is the state before the shard, the maps that led to it, and how far it reaches.
    """
    is_first = _rank(recurrence, axis_name) == 0
    parts = summary(recurrence, prefixes, operands)
    if "reset" in operands:
        # A is zero then, but zero times a tangent that is not finite would still pass.
        cut = jnp.any(operands["reset"], axis=recurrence.axis, keepdims=True)
        parts.append(jnp.broadcast_to(cut, parts[0].shape).astype(recurrence.state))
    # The first shard starts from h0, the others from what those before them make of it.
    parts[1] = jnp.where(is_first, _apply(parts, operands["h0"]), parts[1])
    own = jnp.stack(parts)
    exchange = _gathered if lax.axis_size(axis_name) <= _GATHERED else _doubled
    more, maps = exchange(recurrence, axis_name, own)
    before = jnp.where(is_first, operands["h0"], more)
    given = {**operands, "h0": before}
    h, last = cast(Pair, _primitives.scan(recurrence, given, dtype, True))
    furthest = _furthest(reach(recurrence, prefixes or (), operands))
    return h, last, before, maps, furthest


def _shard_jvp(recurrence, prefixes, dtype, axis_name, primals, tangents):
    """dh = tangent(a, h, s; da, db, dh0 of the first shard) + tangent(a; ds), see above."""
    (operands,), (dots,) = primals, tangents
    outs = _shard(recurrence, prefixes, dtype, axis_name, operands)
    h, last, before, maps, furthest = outs
    dots = {f"d{k}": t for k, t in dots.items() if k != "reset" and not isinstance(t, SymbolicZero)}
    is_first = _rank(recurrence, axis_name) == 0
    dh0 = dots.get("dh0", _like(before, 0))
    shared = {name: operands[name] for name in ("a", "reset") if name in operands}

    dh, dlast = _like(h, 0), _like(last, 0)
    if dots:
        primal = {"h": h, "h0": before} if "da" in dots else {}
        # Zeros where there is none: so this is mapped where h0 is, for the same reason.
        begins = is_first | _never(recurrence, operands["h0"])
        dots["dh0"] = jnp.where(begins, dh0, _like(dh0, 0))
        given = shared | primal | dots
        dh, dlast = cast(Pair, _primitives.tangent(recurrence, given, dtype, True))
        dh, dlast = jnp.broadcast_to(dh, h.shape), jnp.broadcast_to(dlast, last.shape)

    gathered = lax.axis_size(axis_name) <= _GATHERED
    exchange = _gathered_tangent if gathered else _doubled_tangent
    dmore = exchange(recurrence, axis_name, dlast, maps)
    if prefixes:
        given = {**shared, "reach": furthest, "ds": dmore}
        second = _bind(_ONWARD, given, recurrence=recurrence, prefixes=prefixes, dtype=dtype)
    else:
        second = _primitives.tangent(recurrence, shared | {"dh0": dmore}, dtype, True)
    dh, dlast = map(jnp.add, (dh, dlast), cast(Pair, second))
    dbefore = jnp.where(is_first, dh0, dmore)

    # Only a derivative of the derivative reads that of A, and nothing that of H.
    dmaps = _like(maps, 0)
    if "da" in dots:

        def products(a):
            own = jnp.broadcast_to(product(recurrence, shared | {"a": a}), before.shape)
            if gathered:
                return lax.all_gather(own, axis_name)
            return _doubled_products(recurrence, axis_name, own, maps)

        dproducts = jax.jvp(products, (operands["a"],), (dots["da"],))[1]
        dmaps = dmaps.at[:, 0].set(dproducts)
    return outs, (dh, dlast, dbefore, dmaps, _like(furthest, 0))


_shard.defjvp(_shard_jvp, symbolic_zeros=True)


# ---- How far the state before a shard reaches ----------------------------------------------------
#
# Most recurrences forget: the state that leaves a shard depends on its last steps alone, and that
# which enters it matters to its first steps alone. How many these are is decided on the device,
# among a few lengths, for all channels together in `lax`.
#
# The decisions must stay on the device. XLA makes a CUDA graph of operations, conditionals among
# them, that follow each other with no collective in between, if there are five or more; else it
# reads on the host which branch to run, which costs more than all that is saved. So the value and
# the gradient decide in kernels, and no branch has a collective.


def _prefixes(recurrence: Recurrence) -> tuple[int, ...] | None:
    """After how many steps to look whether the shard has forgotten; the whole shard is not listed.

    None where XLA splits other axes by itself: a decision would have to be exchanged.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = set(mesh.axis_names) - set(mesh.manual_axes)
    if any(mesh.shape[name] > 1 for name in automatic):
        return None
    found, count = [], _PREFIX
    while _PARTS * count <= recurrence.length:
        found.append(count)
        count *= _RATIO
    return tuple(found)


@jax.custom_batching.custom_vmap
def _furthest(reach: jax.Array) -> jax.Array:
    """The largest of all, under `jax.vmap` too: a decision for each would have all done.

    It is a number whose tangents are not of a kind of their own.
    """
    return jnp.max(reach, initial=0).astype(np.float32)


@_furthest.def_vmap
def _(size, mapped, reach):
    return _furthest(reach), False


# tangent(a; ds) is a primitive, and so is its transpose. Of a conditional JAX would make two, one
# before the exchange and one after it, and copy from one to the other what the branches read.


def _passed_on(
    operands: Mapping[str, jax.Array], *, recurrence: Recurrence, prefixes: tuple[int, ...], dtype
) -> list[jax.Array]:
    """dh and dlast from a, reset, reach and ds; dh is zero after the steps that ds reaches."""

    def part(count, shared, ds):
        given = first_steps(recurrence, count, shared) | {"dh0": ds}
        dh, _ = _primitives.tangent(recurrence._replace(length=count), given, dtype)
        rest = recurrence.length - count
        padding = [(0, 0, 0)] * dh.ndim
        padding[recurrence.axis] = (rest, 0, 0) if recurrence.reverse else (0, rest, 0)
        return [lax.pad(dh, jnp.zeros((), dtype), padding), _like(ds, 0)]

    def whole(shared, ds):
        return list(_primitives.tangent(recurrence, shared | {"dh0": ds}, dtype, True))

    shared = {name: operands[name] for name in ("a", "reset") if name in operands}
    branches = [*(partial(part, count) for count in prefixes), whole]
    return lax.switch(operands["reach"].astype(np.int32), branches, shared, operands["ds"])


def _passed_back(
    operands: Mapping[str, jax.Array], *, recurrence: Recurrence, prefixes: tuple[int, ...], dtype
) -> list[jax.Array]:
    """The transpose: the cotangent of ds from a, reset, reach and g, gstate or both."""
    given = {name: x for name, x in operands.items() if name != "reach"}
    shape = step_shape(given["g" if "g" in given else "gstate"].shape, recurrence.axis)
    wanted = [Result("dh0", shape, recurrence.state)]

    def part(count, given):
        # The last state does not depend on ds.
        given = {name: x for name, x in given.items() if name != "gstate"}
        if "g" not in given:
            return [jnp.zeros(shape, recurrence.state)]
        shorter = recurrence._replace(length=count)
        return _primitives.cotangent(shorter, first_steps(recurrence, count, given), wanted)

    def whole(given):
        return _primitives.cotangent(recurrence, given, wanted)

    branches = [*(partial(part, count) for count in prefixes), whole]
    return lax.switch(operands["reach"].astype(np.int32), branches, given)


def _passed_back_by_kernel(
    operands: Mapping[str, jax.Array], *, recurrence: Recurrence, prefixes: Any, dtype: Any
) -> list[jax.Array]:
    """The same on a GPU: A gstate + H of the walk back, as far as the kernel reads."""
    a, g = operands["a"], operands.get("g")
    found = None
    if g is not None and prefixes:
        args = [x for x in (a, g, operands.get("reset")) if x is not None]
        full = full_shape(recurrence, [x.shape for x in args])
        walk = {"descending": not recurrence.reverse, "is_cotangent": True}
        found = summary_call(args, full, recurrence.state, recurrence.axis, prefixes, **walk)
    if found is None:
        return _passed_back(operands, recurrence=recurrence, prefixes=prefixes, dtype=dtype)
    result = found[1]
    if "gstate" in operands:
        result = _apply(found, operands["gstate"])
    return [result]


def _new(function: Any, linear: tuple[str, ...], by_kernel: Any = None) -> Primitive:
    """`function` of named operands as a primitive that is linear in some of them.

    `by_kernel` does the same on a GPU.
    """
    primitive = Primitive(f"linear_scan{function.__name__}")
    primitive.multiple_results = True
    primitive.def_impl(partial(xla.apply_primitive, primitive))

    def lowering(function):
        def call(*args, names, **params):
            return function(dict(zip(names, args, strict=True)), **params)

        return mlir.lower_fun(call, multiple_results=True)

    def batch(args, dims, *, names, recurrence, **params):
        """The mapped axis becomes the first one; what reaches furthest decides for all."""
        (size,) = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
        operands = {}
        for name, x, d in zip(names, args, dims, strict=True):
            if name == "reach":
                operands[name] = x if d is None else jnp.max(x, initial=0)
                continue
            x = x[None] if d is None else jnp.moveaxis(x, d, 0)
            operands[name] = jnp.broadcast_to(x, (size, *x.shape[1:])) if name in linear else x
        recurrence = recurrence._replace(axis=recurrence.axis + 1)
        outs = _bind(primitive, operands, recurrence=recurrence, **params)
        return outs, [0] * len(outs)

    def jvp(primals, tangents, *, names, **params):
        named = dict(zip(names, primals, strict=True))
        dots = {
            name: t
            for name, t in zip(names, tangents, strict=True)
            if name in ("a", *linear) and not isinstance(t, ad.Zero)
        }
        if "a" in dots:
            moving = {name: named[name] for name in dots}
            return jax.jvp(lambda moving: function(named | moving, **params), (moving,), (dots,))
        constant = {name: x for name, x in named.items() if name not in linear}
        outs = primitive.bind(*primals, names=names, **params)
        return outs, _bind(primitive, constant | dots, **params)

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    mlir.register_lowering(primitive, lowering(function))
    if by_kernel is not None:
        mlir.register_lowering(primitive, lowering(by_kernel), platform="cuda")
    return primitive


def _bind(primitive: Primitive, operands: dict[str, jax.Array], **params: Any) -> list[jax.Array]:
    operands = _vary_alike(operands)
    return primitive.bind(*operands.values(), names=tuple(operands), **params)


_ONWARD = _new(_passed_on, ("ds",))
_BACK = _new(_passed_back, ("g", "gstate"), _passed_back_by_kernel)


@_ONWARD.def_abstract_eval
def _(*avals, names, recurrence, dtype, **_):
    ds = avals[names.index("ds")]
    axis, shape = recurrence.axis, ds.shape
    full = (*shape[:axis], recurrence.length, *shape[axis + 1 :])
    return [ds.update(shape=full, dtype=dtype), ds]


@_BACK.def_abstract_eval
def _(*avals, names, recurrence, **_):
    given = avals[names.index("g" if "g" in names else "gstate")]
    return [given.update(shape=step_shape(given.shape, recurrence.axis), dtype=recurrence.state)]


def _transpose_onward(cotangents, *args, names, **params):
    named = dict(zip(names, args, strict=True))
    ds = named.pop("ds").aval
    given = dict(zip(("g", "gstate"), cotangents, strict=True))
    given = {name: ct for name, ct in given.items() if not isinstance(ct, ad.Zero)}
    out = _bind(_BACK, named | given, **params)[0] if given else ad.Zero(ds)
    return [out if name == "ds" else None for name in names]


def _transpose_back(cotangents, *args, names, recurrence, prefixes, dtype):
    named = dict(zip(names, args, strict=True))
    (ds,) = cotangents
    if isinstance(ds, ad.Zero):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in args]
    given = {name: x for name, x in named.items() if name not in ("g", "gstate")} | {"ds": ds}
    dh, dlast = _bind(_ONWARD, given, recurrence=recurrence, prefixes=prefixes, dtype=dtype)
    found = {"g": dh, "gstate": dlast}
    return [found[name] if ad.is_undefined_primal(named[name]) else None for name in names]


ad.primitive_transposes[_ONWARD] = _transpose_onward
ad.primitive_transposes[_BACK] = _transpose_back


# ---- The exchange: from the maps of all shards to the state before the own one -------------------
#
# A map is an array of A, H and, where there are resets, whether there was one. Few shards send
# their maps to all, and each applies those that it needs in order. Of many shards each composes its
# map with those of the shards 1, 2, 4, ... before, and sends one as often as the number of shards
# doubles.


def _apply(maps: Any, s: jax.Array) -> jax.Array:
    """A s + H; what starts from zero ends in H, whatever A is, and so does what is forgotten."""
    return jnp.where((maps[0] == 0) | (s == 0), maps[1], maps[0] * s + maps[1])


def _cut(maps: jax.Array) -> jax.Array:
    """Where there was a reset."""
    return maps[2] != 0 if len(maps) > 2 else jnp.zeros_like(maps[0], bool)


def _gathered(recurrence, axis_name, own) -> Pair:
    """The state before the own shard, zero before the first one; and the maps of all shards."""
    maps = lax.all_gather(own, axis_name)
    _, every = lax.scan(
        lambda s, shard: (_apply(shard, s), s),
        _like(own[1], 0),
        maps,
        reverse=recurrence.reverse,
        unroll=min(len(maps), _UNROLL),
    )
    return lax.dynamic_index_in_dim(every, lax.axis_index(axis_name), keepdims=False), maps


def _gathered_tangent(recurrence, axis_name, last, maps) -> jax.Array:
    """Its tangent, linear in those of all last states: a scan over the shards."""
    shards = Recurrence(0, len(maps), recurrence.reverse, False, recurrence.state)
    states = lax.all_gather(last, axis_name)
    # A product that has overflowed must not make a NaN of a tangent that is zero.
    operands = {"a": jnp.nan_to_num(maps[:, 0]), "b": states}
    if maps.shape[1] > 2:
        operands["reset"] = maps[:, 2] != 0
    after, _ = _primitives.scan(shards, operands, recurrence.state)
    index, reverse = lax.axis_index(axis_name), recurrence.reverse
    previous = jnp.clip(index + (1 if reverse else -1), 0, len(maps) - 1)
    before = lax.dynamic_index_in_dim(after, previous, keepdims=False)
    return jnp.where(_rank(recurrence, axis_name) == 0, _like(before, 0), before)


def _doubled(recurrence, axis_name, own) -> Pair:
    """As `_gathered`; the maps are those of the own shard and of 1, 3, 7, ... before it with it."""
    rank, levels, distance = _rank(recurrence, axis_name), [own], 1
    while distance < lax.axis_size(axis_name):
        other = _from_before(recurrence, axis_name, own, distance)
        product = jnp.where(own[0] == 0, own[0], own[0] * other[0])
        composed = [product, _apply(own, other[1]), *jnp.where(_cut(own), own[2:], other[2:])]
        own = jnp.where(rank >= distance, jnp.stack(composed), own)
        levels.append(own)
        distance *= 2
    return _from_before(recurrence, axis_name, own[1], 1), jnp.stack(levels)


def _doubled_tangent(recurrence, axis_name, last, maps) -> jax.Array:
    """As `_gathered_tangent`."""

    def times(level, x):
        product = jnp.nan_to_num(maps[level, 0]) * x
        return jnp.where(_cut(maps[level]), jnp.zeros_like(product), product)

    for level in range(len(maps) - 1):
        last = last + times(level, _from_before(recurrence, axis_name, last, 2**level))
    return _from_before(recurrence, axis_name, last, 1)


def _doubled_products(recurrence, axis_name, product, maps) -> jax.Array:
    """The products in the maps of `_doubled`, as a function of the own one."""
    rank, levels = _rank(recurrence, axis_name), [product]
    for level in range(len(maps) - 1):
        other = _from_before(recurrence, axis_name, product, 2**level)
        composed = jnp.where(_cut(maps[level]), jnp.zeros_like(product), product * other)
        product = jnp.where(rank >= 2**level, composed, product)
        levels.append(product)
    return jnp.stack(levels)


def _rank(recurrence: Recurrence, axis_name: tuple[str, ...]) -> jax.Array:
    """The own shard's number in the order of the scan."""
    index = lax.axis_index(axis_name)
    return lax.axis_size(axis_name) - 1 - index if recurrence.reverse else index


def _from_before(recurrence, axis_name, x: jax.Array, distance: int) -> jax.Array:
    """x of the shard so many before; zeros where there is none."""
    # JAX wants the names in the mesh's order: `at` are the devices in the order of `axis_name`.
    known = jax.sharding.get_abstract_mesh().axis_names
    names = tuple(sorted(axis_name, key=lambda name: known.index(name) if name in known else 0))
    devices = np.arange(lax.axis_size(names)).reshape([lax.axis_size(name) for name in names])
    at = devices.transpose([names.index(name) for name in axis_name]).ravel().tolist()
    if recurrence.reverse:
        at.reverse()
    return lax.ppermute(x, names, list(zip(at, at[distance:], strict=False)))


def _like(x: jax.Array, value: float) -> jax.Array:
    """A constant like `x`, which varies over the same manual axes."""
    return _vary_like(x, jnp.full(x.shape, value, x.dtype))


def _vary_like(x: jax.Array, constant: jax.Array) -> jax.Array:
    return _vary_alike({"x": x, "new": constant})["new"]


def _vary_alike(values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Marks all values as varying over the manual axes over which any of them varies."""
    axes = {name: _compat.varying_axes(jax.typeof(x)) for name, x in values.items()}
    union = frozenset().union(*axes.values())
    return {
        name: _compat.as_varying(x, tuple(union - axes[name])) if union - axes[name] else x
        for name, x in values.items()
    }
