"""The three primitives, and their rules: abstract evaluation, batching, differentiation, dead code.

    linear_scan            (a, b, h0?, reset?)                          -> h, state?
    linear_scan_tangent    (a, h?, h0?, reset?, da?, db?, dh0?)         -> dh, dstate?
    linear_scan_cotangent  (a, h?, h0?, reset?, g?, gstate?)            -> da?, db?, dh0?

What they compute stands in `_reference`. The family is closed: the tangent of a scan is a scan, the
transpose of a scan is a scan the other way, and a derivative of the tangent or the cotangent by
something in which it is not linear is that of its expansion into scans. The static parameter
`operands` names the operands that are there, `results` those that are wanted; `h` and `h0` are
operands of a derivative only where `da` takes part.

A state, `h0` and their derivatives keep the time axis, with size 1, and have the state's dtype. An
operand may have size 1 in any axis. The full shape is what operands and results broadcast to; every
result has it, except that those of the cotangent are summed over the axes in which they have size
1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, xla
from jax.sharding import NamedSharding, PartitionSpec

from jax_scan import _compat, _reference
from jax_scan._reference import Operands, Recurrence, Result, convert, fit, full_shape, step_shape

DTYPES = tuple(
    np.dtype(t)
    for t in (jnp.bfloat16, np.float16, np.float32, np.float64, np.complex64, np.complex128)
)
_ONE_STEP = {"h0", "dh0", "gstate", "state", "dstate"}


class Op(NamedTuple):
    """One of the three operations."""

    name: str
    primitive: Primitive
    operands: tuple[str, ...]
    results: tuple[str, ...]
    linear: dict[str, str]  # operands in which it is linear -> the names of their cotangents


def _new(name: str, operands: str, results: str, **linear: str) -> Op:
    primitive = Primitive("linear_scan" if name == "scan" else f"linear_scan_{name}")
    primitive.multiple_results = True
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    op = Op(name, primitive, tuple(operands.split()), tuple(results.split()), linear)
    primitive.def_abstract_eval(partial(_abstract_eval, op))
    batching.primitive_batchers[primitive] = partial(_batch, primitive)
    _compat.register_dce(primitive, partial(_eliminate, op))
    return op


# ---- Abstract evaluation -------------------------------------------------------------------------


def _abstract_eval(
    op: Op,
    *avals: Any,
    operands: tuple[str, ...],
    results: tuple[Result, ...],
    recurrence: Recurrence,
) -> list[Any]:
    def fail(message: str, error: type[Exception] = ValueError) -> NoReturn:
        given = ", ".join(f"{n}: {x.str_short()}" for n, x in zip(operands, avals, strict=True))
        raise error(f"{op.primitive.name} ({given}): {message}")

    axis, _, _, has_h0, state = recurrence
    named = dict(zip(operands, avals, strict=True))
    names = [result.name for result in results]
    if operands[:1] != ("a",) or [n for n in op.operands if n in named] != list(operands):
        fail(f"operands must be a and some of {op.operands}, in this order")
    if not names or [n for n in op.results if n in names] != names:
        fail(f"results must be some of {op.results}, in this order, got {names}")
    if op is TANGENT and names[0] != "dh":
        fail(f"dh must be among the results, got {names}")
    if op is SCAN and ("b" not in named or ("h0" in named) != has_h0):
        fail(f"has_h0={has_h0} and an operand b are not what is given")
    if not has_h0 and op is not SCAN and ("dh0" in named or "dh0" in names):
        fail("dh0 belongs to a scan with h0")
    if ("da" in named or "da" in names) and ("h" not in named or ("h0" in named) != has_h0):
        fail("h and, if the scan has one, h0 are needed with da")

    rank = len(avals[0].shape)
    if any(len(x.shape) != rank for x in (*avals, *results)) or not 0 <= axis < rank:
        fail(f"ranks must be equal and hold the time axis {axis}")
    full = full_shape(recurrence, [x.shape for x in (*avals, *results)])
    if full[axis] != recurrence.length:
        fail(f"the length is {recurrence.length}, but the time axis has size {full[axis]}")
    for name, x in [*named.items(), *((result.name, result) for result in results)]:
        if name == "reset":
            if x.dtype != np.bool_:
                fail("reset must be bool", TypeError)
        elif x.dtype not in DTYPES or not _holds(state, x.dtype):
            fail(f"{name} can't have dtype {x.dtype} with a {state} state", TypeError)
        if name in _ONE_STEP and (x.shape[axis] != 1 or x.dtype != state):
            fail(f"{name} must have size 1 in time and dtype {state}")
    for result in results:
        one_step = result.name in _ONE_STEP
        if op is not COTANGENT and result.shape != (step_shape(full, axis) if one_step else full):
            fail(f"{result.name} of shape {result.shape} does not match the operands")

    # Results take their manual axes from an operand, so the operands must agree.
    if any(_compat.varying_axes(x) != _compat.varying_axes(avals[0]) for x in avals):
        fail("operands must vary over the same manual mesh axes")
    spec = _spec(avals, full, axis, fail)
    placed = on_mesh(avals)
    outs = []
    for result in results:
        changes: dict[str, Any] = {"shape": result.shape, "dtype": result.dtype}
        if spec is not None:
            kept = (s if n == m else None for s, n, m in zip(spec, full, result.shape, strict=True))
            changes["sharding"] = placed.sharding.update(spec=PartitionSpec(*kept))
        outs.append(placed.update(weak_type=False, **changes))
    return outs


def on_mesh(avals: Sequence[Any]) -> Any:
    """The operand from which results take their mesh: others may be on none, as constants are."""
    return next((x for x in avals if not x.sharding.mesh.empty), avals[0])


def _spec(avals: Sequence[Any], full: Sequence[int], axis: int, fail: Callable) -> list[Any] | None:
    """How each axis is sharded over explicit mesh axes."""
    avals = [x for x in avals if not x.sharding.mesh.empty]
    if not avals:
        return None
    spec: list[Any] = [None] * len(full)
    for k in range(len(full)):
        found = {x.sharding.spec[k] for x in avals if x.shape[k] == full[k]} - {None}
        if len(found) > 1:
            fail(f"operands are sharded differently in axis {k}: {sorted(map(str, found))}")
        spec[k] = found.pop() if found else None
    if spec[axis] is not None:
        fail(
            f"the time axis is sharded over mesh axis {spec[axis]!r}, but a scan needs all of time "
            "on one device; call jax_scan.sequence_parallel_scan with b's sharding, "
            "jax.typeof(b).sharding, or reshard a and b first"
        )
    return spec


def _holds(state: np.dtype, dtype: Any) -> bool:
    """The state loses nothing of an operand of this dtype: `readable` in core/dtype.h."""
    double = (np.float64, np.complex128)
    return (_is_complex(state) or not _is_complex(dtype)) and (
        state in double or dtype not in double
    )


def _is_complex(dtype: Any) -> bool:
    return np.issubdtype(dtype, np.complexfloating)


# ---- Dead code -----------------------------------------------------------------------------------


def _eliminate(op: Op, used: Sequence[bool], equation: Any) -> tuple[list[bool], Any | None]:
    """Drops the results that nobody uses, and with da the h and h0 that only da reads.

    h is an operand of the derivatives, so what drops it may drop the scan that it comes from.
    """
    operands, results = equation.params["operands"], equation.params["results"]
    every = [True] * len(operands)
    if not any(used):
        return [False] * len(operands), None
    kept = [u or (op is TANGENT and k == 0) for k, u in enumerate(used)]
    left = tuple(itertools.compress(results, kept))
    without_da = op is COTANGENT and all(result.name != "da" for result in left)
    needed = [not (without_da and name in ("h", "h0")) for name in operands]

    recurrence = equation.params["recurrence"]
    shapes = [v.aval.shape for v in equation.invars]
    before = full_shape(recurrence, [*shapes, *(r.shape for r in results)])
    after = full_shape(recurrence, [*itertools.compress(shapes, needed), *(r.shape for r in left)])
    # What is left is summed over the axes of the full shape: it must not shrink.
    if after != before or all(kept):
        return every, equation
    return needed, equation.replace(
        invars=list(itertools.compress(equation.invars, needed)),
        outvars=list(itertools.compress(equation.outvars, kept)),
        params=equation.params
        | {"operands": tuple(itertools.compress(operands, needed)), "results": left},
    )


# ---- Batching ------------------------------------------------------------------------------------


def equally_varying(args: Sequence[jax.Array]) -> list[jax.Array]:
    """Marks operands as varying over all manual mesh axes over which any of them does.

    JAX does that for its own operations.
    """
    axes = [_compat.varying_axes(jax.typeof(x)) for x in args]
    union = frozenset().union(*axes)
    return [
        x if mine == union else _compat.as_varying(x, tuple(union - mine))
        for x, mine in zip(args, axes, strict=True)
    ]


def _batch(
    primitive: Primitive,
    args: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    operands: tuple[str, ...],
    results: tuple[Result, ...],
    recurrence: Recurrence,
) -> tuple[list[jax.Array], list[int]]:
    """The mapped axis stays where it is, before or after time; elsewhere it has size 1."""
    mapped = [(x, d) for x, d in zip(args, dims, strict=True) if d is not None]
    # Where operands disagree the one that is broadcast least decides; the others are transposed.
    leader, at = min(mapped, key=lambda pair: pair[0].shape.count(1))

    def place(x, d):
        if d is None:
            return lax.expand_dims(x, (at,))
        return x if d == at else jnp.moveaxis(x, d, at)

    size = leader.shape[at]
    outs = primitive.bind(
        *equally_varying([place(x, d) for x, d in zip(args, dims, strict=True)]),
        operands=operands,
        results=tuple(r._replace(shape=(*r.shape[:at], size, *r.shape[at:])) for r in results),
        recurrence=recurrence._replace(axis=recurrence.axis + (at <= recurrence.axis)),
    )
    return outs, [at] * len(results)


SCAN = _new("scan", "a b h0 reset", "h state", b="db", h0="dh0")
TANGENT = _new("tangent", "a h h0 reset da db dh0", "dh dstate", da="da", db="db", dh0="dh0")
COTANGENT = _new("cotangent", "a h h0 reset g gstate", "da db dh0", g="dh", gstate="dstate")
PRIMITIVES = frozenset(op.primitive for op in (SCAN, TANGENT, COTANGENT))


# ---- Binding -------------------------------------------------------------------------------------


def _bind(op: Op, recurrence: Recurrence, operands: Operands, results: Iterable[Result]) -> list:
    present = {name: operands[name] for name in op.operands if operands.get(name) is not None}
    return op.primitive.bind(
        *equally_varying(list(present.values())),
        operands=tuple(present),
        results=tuple(results),
        recurrence=recurrence,
    )


def _bind_full(
    op: Op, recurrence: Recurrence, operands: Operands, dtype: Any, with_state: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    full = full_shape(recurrence, [x.shape for x in operands.values() if x is not None])
    dtypes = (np.dtype(dtype), recurrence.state)
    shapes = (full, step_shape(full, recurrence.axis))
    results = list(map(Result, op.results, shapes, dtypes))[: 1 + with_state]
    out = _bind(op, recurrence, operands, results)
    return out[0], out[1] if with_state else None


def last_state(recurrence: Recurrence, operands: Operands) -> jax.Array:
    """The state after the last step alone: h is not written."""
    full = full_shape(recurrence, [x.shape for x in operands.values()])
    wanted = Result("state", step_shape(full, recurrence.axis), recurrence.state)
    return _bind(SCAN, recurrence, operands, [wanted])[0]


scan = partial(_bind_full, SCAN)
tangent = partial(_bind_full, TANGENT)
cotangent = partial(_bind, COTANGENT)


# ---- Differentiation -----------------------------------------------------------------------------


def _active(tangents: Sequence[Any], operands: Sequence[str]) -> dict[str, Any]:
    """The tangents that are there: neither symbolic zeros nor those of `reset`."""
    return {
        name: t
        for name, t in zip(operands, tangents, strict=True)
        if not isinstance(t, ad.Zero) and name != "reset"
    }


def _broadcast(outs: Iterable[jax.Array | None], results: Sequence[Result]) -> list[jax.Array]:
    present = (x for x in outs if x is not None)
    return [
        convert(jnp.broadcast_to(x, result.shape), result.dtype)
        for x, result in zip(present, results, strict=True)
    ]


def _as(aval: Any, x: jax.Array) -> jax.Array:
    """`x` sharded over explicit mesh axes as `aval` is, which (co)tangents of it have to be.

    An operand that is sharded less than the others, such as a whole `a`, has such a gradient.
    """
    mine = jax.typeof(x).sharding
    if mine.mesh.empty or mine.spec == aval.sharding.spec:
        return x
    concrete = getattr(x, "sharding", mine)
    mesh = concrete.mesh if isinstance(concrete, NamedSharding) else mine.mesh
    return _compat.reshard(x, NamedSharding(mesh, aval.sharding.spec))


def _scan_jvp(primals, tangents, *, operands, results, recurrence):
    """dh = tangent(a, h, h0; da, db, dh0), with the tangents that are not zero."""
    named = dict(zip(operands, primals, strict=True))
    dots = {f"d{name}": t for name, t in _active(tangents, operands).items()}
    if results[0].name != "h":  # only the state is wanted, but the tangent needs h
        full = full_shape(recurrence, [x.shape for x in primals])
        wanted = (Result("h", full, recurrence.state), *results)
        outs, douts = _scan_jvp(
            primals, tangents, operands=operands, results=wanted, recurrence=recurrence
        )
        return outs[1:], douts[1:]
    outs = SCAN.primitive.bind(*primals, operands=operands, results=results, recurrence=recurrence)
    douts = _tangent_of(recurrence, {**named, "h": outs[0]}, dots, results)
    return outs, [_as(jax.typeof(x), dx) for x, dx in zip(outs, douts, strict=True)]


def _tangent_of(recurrence, named, dots, results) -> list:
    """Binds the tangent: it spans the axes of its own operands, and is broadcast afterwards.

    What is broadcast has the state's dtype, for transposed it is a sum, which h's may not hold.
    """
    primal = ("a", "h", "h0", "reset") if "da" in dots else ("a", "reset")
    given = {name: named[name] for name in primal if name in named} | dots
    h, full = results[0], full_shape(recurrence, [x.shape for x in given.values()])
    dtype = h.dtype if full == h.shape else recurrence.state
    outs = tangent(recurrence, given, dtype, len(results) > 1)
    return _broadcast(outs, results)


def _tangent_jvp(primals, tangents, *, operands, results, recurrence):
    """Linear in (da, db, dh0). Otherwise the tangent of scan(a, da h_prev + db, dh0)."""
    named = dict(zip(operands, primals, strict=True))
    dots = _active(tangents, operands)
    if dots.keys() <= TANGENT.linear.keys():
        outs = TANGENT.primitive.bind(
            *primals, operands=operands, results=results, recurrence=recurrence
        )
        douts = _tangent_of(recurrence, named, dots, results)
        return outs, [_as(jax.typeof(x), dx) for x, dx in zip(outs, douts, strict=True)]

    def expansion(moving):
        outs = _reference.tangent(
            recurrence, {**named, **moving}, results[0].dtype, len(results) > 1, scan=scan
        )
        return _broadcast(outs, results)

    return jax.jvp(expansion, ({name: named[name] for name in dots},), (dots,))


def _cotangent_jvp(primals, tangents, *, operands, results, recurrence):
    """Linear in (g, gstate). Otherwise the tangent of the expansion into a scan and products."""
    named = dict(zip(operands, primals, strict=True))
    dots = _active(tangents, operands)
    if dots.keys() <= COTANGENT.linear.keys():
        outs = cotangent(recurrence, named, results)
        constant = {name: x for name, x in named.items() if name not in COTANGENT.linear}
        return outs, cotangent(recurrence, constant | dots, results)

    def expansion(moving):
        return _reference.cotangent(recurrence, {**named, **moving}, results, scan=scan)

    return jax.jvp(expansion, ({name: named[name] for name in dots},), (dots,))


def _transpose_to_cotangent(op, cotangents, *args, operands, results, recurrence):
    """From cotangents (g, gstate) of results to those of the operands that `op` is linear in."""
    named = dict(zip(operands, args, strict=True))
    unknown = {name: x.aval for name, x in named.items() if ad.is_undefined_primal(x)}
    names = {"h": "g", "dh": "g", "state": "gstate", "dstate": "gstate"}
    given = {
        names[result.name]: ct
        for result, ct in zip(results, cotangents, strict=True)
        if not isinstance(ct, ad.Zero)
    }
    if not unknown.keys() <= op.linear.keys():
        raise NotImplementedError(
            f"{op.primitive.name} is linear in {list(op.linear)} only, not in {list(unknown)}"
        )
    if not given:
        return [ad.Zero(x.aval) if name in unknown else None for name, x in named.items()]
    wanted = {op.linear[name]: aval for name, aval in unknown.items()}
    wanted = [Result(n, wanted[n].shape, wanted[n].dtype) for n in COTANGENT.results if n in wanted]
    primal = ("a", "h", "h0", "reset") if "da" in unknown else ("a", "reset")
    outs = cotangent(recurrence, {n: named[n] for n in primal if n in named} | given, wanted)
    found = {result.name: x for result, x in zip(wanted, outs, strict=True)}
    return [
        _as(unknown[name], found[op.linear[name]]) if name in unknown else None for name in operands
    ]


def _cotangent_transpose(cotangents, *args, operands, results, recurrence):
    """Cotangents of (da, db, dh0) are tangents of (a, b, h0): out comes that of (h, state)."""
    named = dict(zip(operands, args, strict=True))
    unknown = {name: x.aval for name, x in named.items() if ad.is_undefined_primal(x)}
    given = {
        result.name: ct
        for result, ct in zip(results, cotangents, strict=True)
        if not isinstance(ct, ad.Zero)
    }
    if not given:
        return [ad.Zero(x.aval) if name in unknown else None for name, x in named.items()]
    shapes = [x.aval.shape if ad.is_undefined_primal(x) else x.shape for x in args]
    full = full_shape(recurrence, [*shapes, *(result.shape for result in results)])
    primal = ("a", "h", "h0", "reset") if "da" in given else ("a", "reset")
    g = unknown.get("g")
    dtype = recurrence.state if g is None or g.shape != full else g.dtype
    dh, dstate = tangent(
        recurrence, {n: named[n] for n in primal if n in named} | given, dtype, "gstate" in unknown
    )
    found = {}
    if g is not None:
        found["g"] = fit(dh, full, g.shape, g.dtype)
    if dstate is not None:
        aval = unknown["gstate"]
        found["gstate"] = fit(dstate, step_shape(full, recurrence.axis), aval.shape, aval.dtype)
    return [_as(unknown[name], found[name]) if name in found else None for name in operands]


ad.primitive_jvps[SCAN.primitive] = _scan_jvp
ad.primitive_jvps[TANGENT.primitive] = _tangent_jvp
ad.primitive_jvps[COTANGENT.primitive] = _cotangent_jvp
ad.primitive_transposes[SCAN.primitive] = partial(_transpose_to_cotangent, SCAN)
ad.primitive_transposes[TANGENT.primitive] = partial(_transpose_to_cotangent, TANGENT)
ad.primitive_transposes[COTANGENT.primitive] = _cotangent_transpose
