"""From the primitives to XLA: a custom call on cpu and cuda, `lax` everywhere else.

The attributes that are written here are those that core/operands.h reads.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_scan import _native, _reference
from jax_scan._primitives import COTANGENT, SCAN, TANGENT, Op
from jax_scan._reference import Recurrence, Result, fit, full_shape, step_shape

# The bound on a Broadcast's axes in core/problem.h.
_MAX_AXES = 6


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
    outs = function(recurrence, named, results[0].dtype, len(results) > 1)
    return [x for x in outs if x is not None]


def _with_kernel(
    op: Op,
    platform: str,
    *args: jax.Array,
    operands: tuple[str, ...],
    results: tuple[Result, ...],
    recurrence: Recurrence,
) -> list[jax.Array]:
    full = full_shape(recurrence, [x.shape for x in (*args, *results)])
    if not _has_kernel(full):
        return _with_lax(op, *args, operands=operands, results=results, recurrence=recurrence)

    # The kernel's results have the full shape, or that of a step. What a cotangent sums besides
    # time is summed afterwards, in the state's precision.
    axis = recurrence.axis
    step = step_shape(full, axis)
    one_step = {"state", "dstate", "dh0"}
    raw = []
    for result in results:
        over_time = result.name == "da" and result.shape[axis] < full[axis]
        shape = step if over_time or result.name in one_step else full
        dtype = result.dtype if result.shape == shape else recurrence.state
        raw.append(Result(result.name, shape, dtype))
    workspace = []
    if platform == "cuda":
        if not all(isinstance(n, int) for n in full):
            raise ValueError(f"on CUDA all sizes of a scan must be known, got {full}")
        sizes = math.prod(full[:axis]), full[axis], math.prod(full[axis + 1 :])
        size = _native.module(platform).workspace_bytes(op.name, *sizes, recurrence.state.name)
        workspace.append(Result("workspace", (size,), np.dtype(np.uint8)))

    outs = _custom_call.bind(
        *(_addressable(x, full, axis) for x in args),
        target=_native.TARGETS[op.name],
        operands=operands,
        results=(*raw, *workspace),
        recurrence=recurrence,
    )
    return [
        fit(x, r.shape, result.shape, result.dtype)
        for x, r, result in zip(outs, raw, results, strict=False)
    ]


def _has_kernel(full: tuple[int, ...]) -> bool:
    """Scans without any elements are left to XLA."""
    return 0 not in full


def _addressable(x: jax.Array, full: tuple[int, ...], axis: int) -> jax.Array:
    """`x`; materialised if its full and broadcast axes alternate more than a kernel can follow."""

    def runs(axes: range) -> int:
        kinds = [x.shape[k] == 1 for k in axes if full[k] != 1]
        return sum(k == 0 or kinds[k] != kinds[k - 1] for k in range(len(kinds)))

    if max(runs(range(axis)), runs(range(axis + 1, len(full)))) > _MAX_AXES:
        return jax.numpy.broadcast_to(x, (*full[:axis], x.shape[axis], *full[axis + 1 :]))
    return x


# The custom call itself. It exists in lowered code only, so it needs no other rules.
_custom_call = Primitive("linear_scan_custom_call")
_custom_call.multiple_results = True


@_custom_call.def_abstract_eval
def _custom_call_abstract_eval(*avals: Any, results: tuple[Result, ...], **_: Any) -> list[Any]:
    return [avals[0].update(shape=r.shape, dtype=r.dtype, weak_type=False) for r in results]


def _custom_call_lowering(
    ctx: mlir.LoweringRuleContext,
    *args: Any,
    target: str,
    operands: tuple[str, ...],
    results: tuple[Result, ...],
    recurrence: Recurrence,
) -> Any:
    # Operands and results are row-major, which is what ffi_lowering asks of XLA unless it is told
    # otherwise. None share memory: an alias of an operand that is not donated costs a copy.
    # Attributes by which XLA splits the call over devices would be `extra_attributes` here.
    rule = jax.ffi.ffi_lowering(target)
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
    )


mlir.register_lowering(_custom_call, _custom_call_lowering)

for _op in (SCAN, TANGENT, COTANGENT):
    mlir.register_lowering(
        _op.primitive, mlir.lower_fun(partial(_with_lax, _op), multiple_results=True)
    )
    for _platform in ("cpu", "cuda"):
        mlir.register_lowering(
            _op.primitive,
            mlir.lower_fun(partial(_with_kernel, _op, _platform), multiple_results=True),
            platform=_platform,
        )
