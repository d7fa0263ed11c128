"""From the primitives to XLA: a custom call on cpu and cuda, `lax` everywhere else.

The attributes that are written here are those that core/operands.h reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from jax_scan import _native, _reference
from jax_scan._primitives import COTANGENT, SCAN, TANGENT, Op, on_mesh
from jax_scan._reference import Recurrence, Result, Shape, fit, full_shape, step_shape

# The bound on a Broadcast's axes in core/problem.h.
_MAX_AXES = 6
_BYTE = np.dtype(np.uint8)


def _with_lax(
    op: Op,
    *args: jax.Array,
    operands: tuple[str, ...],
    results: tuple[Result, ...],
    recurrence: Recurrence,
) -> list[jax.Array]:
    named = dict(zip(operands, args, strict=True))
    if op is COTANGENT:
        return _reference.cotangent(recurrence, named, results)
    function = _reference.scan if op is SCAN else _reference.tangent
    outs = function(recurrence, named, results[0].dtype, results[-1].name in ("state", "dstate"))
    return [x for x in outs if x is not None][-len(results) :]


def _with_kernel(
    op: Op,
    platform: str,
    partitions: int,
    *args: jax.Array,
    operands: tuple[str, ...],
    results: tuple[Result, ...],
    recurrence: Recurrence,
) -> list[jax.Array]:
    full = full_shape(recurrence, [x.shape for x in (*args, *results)])
    if not _has_kernel(full):
        return _with_lax(op, *args, operands=operands, results=results, recurrence=recurrence)

    if platform == "cuda" and not all(isinstance(n, int) for n in full):
        raise ValueError(f"on CUDA all sizes of a scan must be known, got {full}")
    split = _can_partition(full, partitions)

    # The kernel's results have the full shape, or that of a step, or where the kernel can sum that
    # of a sum. What else a cotangent sums is summed afterwards, in the state's precision.
    axis = recurrence.axis
    step = step_shape(full, axis)

    def kernel_result(result: Result, shape: Shape) -> Result:
        dtype = result.dtype if result.shape == shape else recurrence.state
        return Result(result.name, shape, dtype)

    one_step = {"state", "dstate", "dh0"}
    raw = [kernel_result(r, step if r.name in one_step else full) for r in results]
    if results[0].name == "da":
        for shape in _sums(results[0].shape, full, axis):
            summed = [kernel_result(results[0], shape), *raw[1:]]
            if shape == step or (
                not split and _sums_over_runs(platform, args, operands, summed, full, recurrence)
            ):
                raw = summed
                break

    call = partial(_partitioned, partitions=partitions) if split else _plain
    outs = call(
        [_addressable(x, full, axis) for x in args],
        raw,
        full,
        op=op,
        platform=platform,
        operands=operands,
        recurrence=recurrence,
    )
    return [
        fit(x, r.shape, result.shape, result.dtype)
        for x, r, result in zip(outs, raw, results, strict=False)
    ]


def _plain(
    args: list[jax.Array],
    raw: list[Result],
    full: Shape,
    *,
    op: Op,
    platform: str,
    operands: tuple[str, ...],
    recurrence: Recurrence,
) -> list[jax.Array]:
    """One call for all of it, or for what a device holds where `jax.shard_map` has split it."""
    axis = recurrence.axis
    workspace = []
    if platform == "cuda":
        size = _workspace_for_sum(args, operands, raw, full, recurrence)
        if size is None:
            sizes = op.name, *_sizes(full, axis), recurrence.state.name
            size = _native.module(platform).workspace_bytes(*sizes)
        workspace.append(Result("workspace", (size,), _BYTE))
    return _custom_call.bind(
        *args,
        target=_native.TARGETS[op.name],
        operands=operands,
        results=(*raw, *workspace),
        recurrence=recurrence,
        repeated=(0,) * len(args),
        batch_axes=0,
    )


def _sums(shape: Shape, full: Shape, axis: int) -> list[Shape]:
    """What a kernel may sum on the way to a sum of this shape.

    Over all of time, or else over the last axes, or over the last ones before time. The best first.
    """
    if shape[axis] < full[axis]:
        return [step_shape(full, axis)]
    found = []
    for axes in (range(axis + 1, len(full)), range(axis)):
        kept = next((k for k in reversed(axes) if shape[k] != 1), axes.start - 1)
        summed = range(kept + 1, axes.stop)
        found.append(tuple(1 if k in summed else n for k, n in enumerate(full)))
    return [sum_shape for sum_shape in found if sum_shape != full]


def _sums_over_runs(
    platform: str,
    args: Sequence[jax.Array],
    operands: tuple[str, ...],
    raw: list[Result],
    full: Shape,
    recurrence: Recurrence,
) -> bool:
    """Whether the kernel sums da over other axes than time, to the shape that it has in `raw`."""
    if platform == "cuda":
        return _workspace_for_sum(args, operands, raw, full, recurrence) is not None
    if not all(isinstance(n, int) for n in full):
        return False
    axis = recurrence.axis
    sizes = *_sizes(full, axis), *_runs(raw[0].shape, full, axis), recurrence.state.name
    return _native.module(platform).sums_da(*sizes)


def _sizes(full: Shape, axis: int) -> tuple[int, int, int]:
    """Sizes outside of time, in time and within, as core/problem.h has them."""
    return math.prod(full[:axis]), full[axis], math.prod(full[axis + 1 :])


def _runs(shape: Shape, full: Shape, axis: int) -> tuple[int, int]:
    """How many neighbouring inner indices, and outer ones, have an element of `shape` in common."""
    outer, _, inner = _sizes(full, axis)
    return inner // math.prod(shape[axis + 1 :]), outer // math.prod(shape[:axis])


def _workspace_for_sum(
    args: Sequence[jax.Array],
    operands: tuple[str, ...],
    raw: list[Result],
    full: Shape,
    recurrence: Recurrence,
) -> int | None:
    """On CUDA the workspace of a call that sums da over other axes than time.

    None where da is not summed so, and where the kernels can't: that depends on sizes and dtypes.
    """
    axis = recurrence.axis
    if raw[0].name != "da" or raw[0].shape in (full, step_shape(full, axis)):
        return None
    dtypes = {name: x.dtype.name for name, x in zip(operands, args, strict=True)}
    dtypes |= {result.name: result.dtype.name for result in raw}
    return _native.module("cuda").summed_workspace_bytes(
        *_sizes(full, axis),
        *_runs(raw[0].shape, full, axis),
        recurrence.state.name,
        *(dtypes.get(name, "") for name in ("a", "h", "g", "db")),
    )


def _partitioned(
    args: list[jax.Array],
    raw: list[Result],
    full: Shape,
    *,
    partitions: int,
    op: Op,
    platform: str,
    operands: tuple[str, ...],
    recurrence: Recurrence,
) -> list[jax.Array]:
    """A call that XLA splits over its devices in every axis but time.

    XLA can split a custom call in leading axes that all operands and results have. So time is
    written as the last axis, and the layouts say where it lies in memory: on a GPU the transposes
    are no operations. A broadcast axis would be split too, so it gets as many equal entries as
    there are devices, of which each device has at least one and reads the first; never more than
    the axis has. Where operands are not all split alike XLA follows the first one, so that must
    have every axis.
    """
    axis, batch = recurrence.axis, len(full) - 1

    def expanded(x: jax.Array) -> Shape:
        return (*full[:axis], x.shape[axis], *full[axis + 1 :])

    def bytes_added(name: str) -> int:
        x = named[name]
        return (math.prod(expanded(x)) - x.size) * x.dtype.itemsize

    named = dict(zip(operands, args, strict=True))
    leader = min(named, key=bytes_added)
    named[leader] = jnp.broadcast_to(named[leader], expanded(named[leader]))
    named = {leader: named.pop(leader)} | named

    def spread(x: jax.Array) -> tuple[jax.Array, int]:
        shape, repeated = list(x.shape), 0
        for k in range(len(full)):
            if k != axis and x.shape[k] == 1 != full[k]:
                shape[k] = min(full[k], partitions)
                repeated |= 1 << k
        return jnp.moveaxis(jnp.broadcast_to(x, shape), axis, -1), repeated

    def time_last(shape: Shape) -> Shape:
        return (*shape[:axis], *shape[axis + 1 :], shape[axis])

    workspace = []
    if platform == "cuda":
        sizes = op.name, recurrence.length, recurrence.state.name
        size = _native.module(platform).workspace_bytes_per_channel(*sizes)
        workspace.append(Result("workspace", (*time_last(full)[:batch], size), _BYTE))
    spreads = [spread(x) for x in named.values()]
    outs = _custom_call.bind(
        *(x for x, _ in spreads),
        target=_native.TARGETS[op.name],
        operands=tuple(named),
        results=(*(r._replace(shape=time_last(r.shape)) for r in raw), *workspace),
        recurrence=recurrence,
        repeated=tuple(axes for _, axes in spreads),
        batch_axes=batch,
    )
    return [jnp.moveaxis(x, -1, axis) for x, _ in zip(outs, raw, strict=False)]


def _can_partition(full: tuple[int, ...], partitions: int) -> bool:
    """XLA has something to split, and the attributes for it can be written.

    They hold sizes, which must be known, and sets of axes, one bit for each.
    """
    return 1 < len(full) < 63 and partitions > 1 and all(isinstance(n, int) for n in full)


def _partitions(context: Any) -> int:
    """Over how many devices XLA may split a call."""
    where = context.module_context.axis_context
    if isinstance(where, mlir.SPMDAxisContext):
        # Inside jax.shard_map: what it has split over all axes is as on one device.
        return 1 if where.manual_axes == set(where.mesh.axis_names) else where.mesh.size
    return getattr(where, "num_devices", 1)


def _has_kernel(full: tuple[int, ...]) -> bool:
    """Scans without any elements are left to XLA."""
    return 0 not in full


def _addressable(x: jax.Array, full: tuple[int, ...], axis: int) -> jax.Array:
    """`x`; materialised if its full and broadcast axes alternate more than a kernel can follow."""

    def runs(axes: range) -> int:
        kinds = [x.shape[k] == 1 for k in axes if full[k] != 1]
        return sum(k == 0 or kinds[k] != kinds[k - 1] for k in range(len(kinds)))

    if max(runs(range(axis)), runs(range(axis + 1, len(full)))) > _MAX_AXES:
        return jnp.broadcast_to(x, (*full[:axis], x.shape[axis], *full[axis + 1 :]))
    return x


# The custom call itself. It exists in lowered code only, so it needs no other rules.
_custom_call = Primitive("linear_scan_custom_call")
_custom_call.multiple_results = True


@_custom_call.def_abstract_eval
def _custom_call_abstract_eval(*avals: Any, results: tuple[Result, ...], **_: Any) -> list[Any]:
    placed = on_mesh(avals)
    explicit = not placed.sharding.mesh.empty
    specs = [x.sharding.spec for x in avals if not x.sharding.mesh.empty]

    def split(shape: Shape) -> PartitionSpec:
        """With explicit axes a result is split like the operands, in each axis that it has."""
        if len(shape) != len(avals[0].shape):
            return PartitionSpec(*[None] * len(shape))
        spec = (next((s for s in over if s is not None), None) for over in zip(*specs, strict=True))
        return PartitionSpec(*(s if n > 1 else None for s, n in zip(spec, shape, strict=True)))

    outs = []
    for r in results:
        changes: dict[str, Any] = {"shape": r.shape, "dtype": r.dtype, "weak_type": False}
        if explicit:
            changes["sharding"] = placed.sharding.update(spec=split(r.shape))
        outs.append(placed.update(**changes))
    return outs


def _custom_call_lowering(
    ctx: mlir.LoweringRuleContext,
    *args: Any,
    target: str,
    operands: tuple[str, ...],
    results: tuple[Result, ...],
    recurrence: Recurrence,
    repeated: tuple[int, ...],
    batch_axes: int,
) -> Any:
    # In memory operands and results are row-major, which is what ffi_lowering asks of XLA unless it
    # is told otherwise. None share memory: an alias of an operand that is not donated costs a copy,
    # and XLA drops the aliases of a call that it splits.
    options: dict[str, Any] = {}
    if batch_axes:
        sources: Any = ctx.avals_in
        targets: Any = ctx.avals_out
        # Minor axis first. Memory has time, the last axis, before the axes that follow it there.
        at = recurrence.axis
        layout = (*reversed(range(at, batch_axes)), batch_axes, *reversed(range(at)))
        flat = tuple(range(batch_axes, -1, -1))
        options = {
            "operand_layouts": [layout] * len(args),
            "result_layouts": [flat if r.name == "workspace" else layout for r in results],
            "extra_attributes": _splitting(
                [x.shape for x in sources], [x.shape for x in targets], repeated, at
            ),
        }
    rule = jax.ffi.ffi_lowering(target, **options)
    return rule(
        ctx,
        *args,
        operands=" ".join(operands),
        results=" ".join(result.name for result in results),
        axis=recurrence.axis,
        length=recurrence.length,
        reverse=recurrence.reverse,
        has_h0=recurrence.has_h0,
        state=recurrence.state.name,
        time_last=batch_axes > 0,
        repeated=np.asarray(repeated, np.int64),
    )


def _splitting(
    operands: Sequence[Shape], results: Sequence[Shape], repeated: Sequence[int], axis: int
) -> dict[str, Any]:
    """The attributes by which XLA splits a call in all axes but the last.

    `num_batch_dims` is for XLA's partitioner. The rule is for Shardy, which decides how arrays are
    sharded: every axis of an operand or result is a factor, and axes with the same factor are
    sharded alike. A repeated axis has a factor of its own.
    """
    batch_axes = len(operands[0]) - 1
    sizes: dict[str, int] = {}
    together: dict[tuple[int, int], str] = {}
    whole = []

    def factor(k: int, n: int, *, shared: bool) -> str:
        if shared and (k, n) in together:
            return together[k, n]
        letters, index = "ijklmnopqrstuvwxyz", len(sizes)  # the names that the text form knows
        name = letters[index] if index < len(letters) else f"z_{index - len(letters) + 1}"
        sizes[name] = n
        if shared:
            together[k, n] = name
        if not shared or k == batch_axes:
            whole.append(name)
        return name

    def factors(shape: Shape, repeated: int) -> str:
        names = []
        for k, n in enumerate(shape):
            in_memory = k + (k >= axis)
            own = k < batch_axes and repeated >> in_memory & 1
            names.append(factor(k, n, shared=not own))
        return f"[{', '.join(names)}]"

    sources = ", ".join(map(factors, operands, repeated))
    targets = ", ".join(factors(shape, 0) for shape in results)
    rule = (
        f"#sdy.op_sharding_rule<({sources})->({targets}) "
        f"{{{', '.join(f'{name}={n}' for name, n in sizes.items())}}} "
        f"need_replication={{{', '.join(whole)}}}, custom>"
    )
    count = mlir.ir.StringAttr.get(str(batch_axes))
    return {
        "mhlo.frontend_attributes": mlir.ir.DictAttr.get({"num_batch_dims": count}),
        "sdy.sharding_rule": mlir.ir.Attribute.parse(rule),
    }


mlir.register_lowering(_custom_call, _custom_call_lowering)


def _lower(op: Op, platform: str, ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
    traced = partial(_with_kernel, op, platform, _partitions(ctx))
    return mlir.lower_fun(traced, multiple_results=True)(ctx, *args, **params)


for _op in (SCAN, TANGENT, COTANGENT):
    mlir.register_lowering(
        _op.primitive, mlir.lower_fun(partial(_with_lax, _op), multiple_results=True)
    )
    for _platform in ("cpu", "cuda"):
        mlir.register_lowering(_op.primitive, partial(_lower, _op, _platform), platform=_platform)
