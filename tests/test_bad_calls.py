"""A catalogue of bad calls: each is an exception that names the argument, what it got and why not.

An entry is a name, the exception, what its message has to hold, and the call. After each of them
the next good call works.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import handlers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from devices import mesh
from jax import export
from jax.experimental import sparse
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_scan
from jax_scan import (
    _native,
    _primitives,
    export_checks,
    linear_scan,
    save_scans,
    sequence_parallel_scan,
)
from jax_scan._primitives import COTANGENT, SCAN, TANGENT
from jax_scan._reference import Recurrence, Result

try:
    import torch
except ModuleNotFoundError:
    if os.environ.get("JAX_SCAN_REQUIRE_TORCH") == "1":
        raise
    torch = None


class Bad(NamedTuple):
    name: str
    error: type[Exception]
    message: tuple[str, ...]  # parts of it
    call: Callable[[], Any]


def bad(name: str, error: type[Exception], *message: str) -> Callable[..., Bad]:
    """bad(name, error, parts of its message)(function, arguments)"""

    def of(function: Callable, *args: Any, **options: Any) -> Bad:
        return Bad(name, error, message, partial(function, *args, **options))

    return of


def each(calls: list[Bad]) -> Any:
    return pytest.mark.parametrize("call", [pytest.param(c, id=c.name) for c in calls])


def check(call: Bad) -> None:
    with pytest.raises(call.error) as caught:
        jax.block_until_ready(call.call())
    message = str(caught.value)
    missing = [part for part in call.message if part not in message]
    assert not missing, f"{missing} not in: {message}"
    np.testing.assert_array_equal(linear_scan(2.0, np.ones(3), axis=-1), [1, 3, 7])


B = np.ones((2, 5, 3), np.float32)
C = B.astype(np.complex64)
DTYPES = "must have one of the dtypes bfloat16, float16, float32, float64, complex64, complex128"
KINDS = "must be a JAX or NumPy array or a Python number"
scan = linear_scan


def jitted(name: str, value: Any) -> Any:
    """An option that JAX traces."""
    return jax.jit(lambda x: scan(B, B, **{name: x}))(value)


def deleted() -> jax.Array:
    x = jnp.asarray(B)
    x.delete()
    return x


# ---- linear_scan and the other functions ---------------------------------------------------------

PYTHON = [
    # dtypes
    bad("a of int32", TypeError, f"a {DTYPES}, got int32")(scan, B.astype(np.int32), B),
    bad("a of uint8", TypeError, f"a {DTYPES}, got uint8")(scan, B.astype(np.uint8), B),
    bad("a of bool", TypeError, f"a {DTYPES}, got bool")(scan, B > 0, B),
    bad("b of int8", TypeError, f"b {DTYPES}, got int8")(scan, B, B.astype(np.int8)),
    bad("b of JAX integers", TypeError, f"b {DTYPES}, got int64")(scan, B, jnp.ones(3, int)),
    bad("b of float8", TypeError, f"b {DTYPES}, got float8_e4m3fn")(
        scan, B, B.astype(ml_dtypes.float8_e4m3fn)
    ),
    bad("b of int4", TypeError, f"b {DTYPES}, got int4")(scan, B, B.astype(ml_dtypes.int4)),
    bad("b of long doubles", TypeError, f"b {DTYPES}, got float128")(
        scan, B, B.astype(np.longdouble)
    ),
    bad("b in the other byte order", TypeError, f"b {DTYPES}, got >f4")(scan, B, B.astype(">f4")),
    bad("b of strings", TypeError, f"b {DTYPES}, got <U1")(scan, B, np.array(["x"])),
    bad("a of objects", TypeError, f"a {DTYPES}, got object")(scan, np.array([None]), B),
    bad("b of dates", TypeError, f"b {DTYPES}, got datetime64[s]")(scan, B, np.zeros(3, "M8[s]")),
    bad("b of records", TypeError, f"b {DTYPES}, got [('f0'")(scan, B, np.zeros(3, "f4,f4")),
    bad("b of random keys", TypeError, f"b {DTYPES}, got key<")(scan, B, jax.random.key(0)),
    bad("h0 of int64", TypeError, f"h0 {DTYPES}, got int64")(scan, B, B, np.ones((2, 3), int)),
    bad("complex h0", TypeError, "h0 is complex64, but a (float32) and b", "state float32")(
        scan, B, B, C[:, 0]
    ),
    bad("complex number as h0", TypeError, "h0 is complex", "make the state float32")(
        scan, B, B, 1j
    ),
    bad("reset of int64", TypeError, "reset must have dtype bool, got int64")(
        scan, B, B, reset=np.ones(5, int)
    ),
    bad("reset of float32", TypeError, "reset must have dtype bool, got float32")(
        scan, B, B, reset=jnp.asarray(B[0, :, 0])
    ),
    bad("two dtypes under strict promotion", ValueError, "float16", "float32", "promotion")(
        scan, B, B.astype(np.float16)
    ),
    # out_dtype
    bad("out_dtype int32", TypeError, f"out_dtype {DTYPES}, got int32")(
        scan, B, B, out_dtype=np.int32
    ),
    bad("out_dtype bool", TypeError, f"out_dtype {DTYPES}, got bool")(scan, B, B, out_dtype=bool),
    bad("out_dtype float8", TypeError, f"out_dtype {DTYPES}, got float8_e5m2")(
        scan, B, B, out_dtype="float8_e5m2"
    ),
    bad("out_dtype without a meaning", TypeError, f"out_dtype {DTYPES}, got float31")(
        scan, B, B, out_dtype="float31"
    ),
    bad("out_dtype a number", TypeError, f"out_dtype {DTYPES}, got 3")(scan, B, B, out_dtype=3),
    bad("out_dtype a list", TypeError, f"out_dtype {DTYPES}, got [1]")(scan, B, B, out_dtype=[1]),
    bad(
        "out_dtype an array", TypeError, "out_dtype must be a dtype, got an array of dtype float32"
    )(scan, B, B, out_dtype=B),
    bad("out_dtype traced", TypeError, "out_dtype must be a dtype, got an array")(
        jitted, "out_dtype", 1.0
    ),
    bad("complex to real", TypeError, "out_dtype is float32, but a (complex64) and b (float32)")(
        scan, C, B, out_dtype="float32"
    ),
    # kinds
    bad("no arguments", TypeError, "'a' and 'b'")(scan),
    bad("no b", TypeError, "'b'")(scan, B),
    bad("unknown option", TypeError, "unexpected keyword argument 'dim'")(scan, B, B, dim=1),
    bad("options by position", TypeError, "positional arguments")(scan, B, B, None, 1),
    bad("a is None", TypeError, f"a {KINDS}, got None")(scan, None, B),
    bad("b is None", TypeError, f"b {KINDS}, got None")(scan, B, None),
    bad("a is a list", TypeError, f"a {KINDS}, got [0.5] of type list")(scan, [0.5], B),
    bad("a is a tuple", TypeError, f"a {KINDS}, got (0.5,) of type tuple")(scan, (0.5,), B),
    bad("a is a dict", TypeError, f"a {KINDS}, got {{}} of type dict")(scan, {}, B),
    bad("a is a string", TypeError, f"a {KINDS}, got 'a' of type str")(scan, "a", B),
    bad("a is a bool", TypeError, f"a {KINDS}, got True of type bool")(scan, True, B),
    bad("a is a type", TypeError, f"a {KINDS}, got <class 'numpy.float32'>")(scan, np.float32, B),
    bad("b is a long list", TypeError, f"b {KINDS}, got [0, 1, 2, 3, 4, 5, ...] of type list")(
        scan, B, list(range(100000))
    ),
    bad("b is a function", TypeError, f"b {KINDS}, got <ufunc 'sin'>")(scan, B, np.sin),
    bad("b is a shape", TypeError, f"b {KINDS}, got ShapeDtypeStruct")(
        scan, B, jax.ShapeDtypeStruct((2, 5, 3), np.float32)
    ),
    bad("b is sparse", TypeError, f"b {KINDS}, got BCOO")(
        lambda: scan(B, sparse.BCOO.fromdense(B))
    ),
    bad("b is masked", TypeError, f"b {KINDS}, got a masked array")(
        scan, B, np.ma.masked_array(B, B > 2)
    ),
    bad("b has been deleted", RuntimeError, "deleted", "[2,5,3]")(lambda: scan(B, deleted())),
    bad("a is a huge int", ValueError, "a is an int beyond the range of float64")(scan, 10**400, B),
    bad("h0 is a huge int", ValueError, "h0 is an int beyond")(scan, B, B, -(10**400)),
    bad("h0 is a list", TypeError, f"h0 {KINDS}, got [0.0] of type list")(scan, B, B, [0.0]),
    bad("h0 is a string", TypeError, f"h0 {KINDS}, got 'zeros' of type str")(scan, B, B, "zeros"),
    bad("h0 is a bool", TypeError, f"h0 {KINDS}, got False of type bool")(scan, B, B, False),
    bad("reset is a number", TypeError, "reset must be a boolean array, got 1 of type int")(
        scan, B, B, reset=1
    ),
    bad("reset is a list", TypeError, "reset must be a boolean array, got [True] of type list")(
        scan, B, B, reset=[True]
    ),
    bad("axis is a float", TypeError, "axis must be an int, got 1.0 of type float")(
        scan, B, B, axis=1.0
    ),
    bad("axis is a bool", TypeError, "axis must be an int, got True of type bool")(
        scan, B, B, axis=True
    ),
    bad("axis is None", TypeError, "axis must be an int, got None")(scan, B, B, axis=None),
    bad("axis is a string", TypeError, "axis must be an int, got '1'")(scan, B, B, axis="1"),
    bad("axis is a tuple", TypeError, "axis must be an int, got (1,)")(scan, B, B, axis=(1,)),
    bad("axis is an array", TypeError, "axis must be an int, got array([1])")(
        scan, B, B, axis=np.array([1])
    ),
    bad("axis is traced", TypeError, "axis must be an int, got a value traced", "must be static")(
        jitted, "axis", 1
    ),
    bad("reverse is a number", TypeError, "reverse must be True or False, got 1 of type int")(
        scan, B, B, reverse=1
    ),
    bad("reverse is a string", TypeError, "reverse must be True or False, got 'no' of type str")(
        scan, B, B, reverse="no"
    ),
    bad("reverse is an array", TypeError, "reverse must be True or False, got array")(
        scan, B, B, reverse=np.array([True, False])
    ),
    bad("reverse is traced", TypeError, "reverse must be True or False, got a value traced")(
        jitted, "reverse", True
    ),
    bad("return_state is None", TypeError, "return_state must be True or False, got None")(
        scan, B, B, return_state=None
    ),
    bad("return_state is traced", TypeError, "return_state must be True or False, got a value")(
        jitted, "return_state", True
    ),
    # shapes
    bad("axis too large", ValueError, "axis 3 is out of range for b of shape (2, 5, 3)")(
        scan, B, B, axis=3
    ),
    bad("axis too small", ValueError, "axis -4 is out of range for b of shape (2, 5, 3)")(
        scan, B, B, axis=-4
    ),
    bad("axis of no machine's ints", ValueError, f"axis {10**30} is out of range for b")(
        scan, B, B, axis=10**30
    ),
    bad("rank 1", ValueError, "axis -2 is out of range for b of shape (3,)", "time is axis=-1")(
        scan, B[0, 0], B[0, 0]
    ),
    bad("b without axes", ValueError, "b must have a time axis, got a scalar")(
        scan, 0.5, 0.5, axis=-1
    ),
    bad("a has more channels", ValueError, "a of shape (2, 5, 3) does not", "b's shape, (2, 5, 1)")(
        scan, B, B[..., :1]
    ),
    bad("a of higher rank", ValueError, "a of shape (2, 5, 3) does not broadcast", "(5, 3)")(
        scan, B, B[0]
    ),
    bad("a of another length", ValueError, "a of shape (2, 4, 3) does not broadcast")(
        scan, B[:, 1:], B
    ),
    bad("a of another batch", ValueError, "a of shape (3, 5, 3) does not broadcast")(
        scan, np.ones((3, 5, 3), np.float32), B
    ),
    bad("a is empty", ValueError, "a of shape (0, 5, 3) does not broadcast")(scan, B[:0], B),
    bad("h0 with time", ValueError, "h0 of shape (2, 5, 3)", "without the time axis, (2, 3)")(
        scan, B, B, B
    ),
    bad("h0 of the wrong size", ValueError, "h0 of shape (5,) does not")(scan, B, B, B[0, :, 0]),
    bad("h0 of the wrong batch", ValueError, "h0 of shape (3, 3) does not")(scan, B, B, B[0, :3]),
    bad("reset with channels", ValueError, "reset of shape (2, 5, 3)", "including time, (2, 5)")(
        scan, B, B, reset=B > 0
    ),
    bad("reset too short", ValueError, "reset of shape (4,) does not")(
        scan, B, B, reset=np.ones(4, bool)
    ),
    bad("reset for the batch", ValueError, "reset of shape (2,) does not")(
        scan, B, B, reset=np.ones(2, bool)
    ),
    bad("an unknown length", ValueError, "the length of the time axis must be known, got l")(
        lambda: export.export(jax.jit(scan), disabled_checks=export_checks())(
            *[jax.ShapeDtypeStruct(export.symbolic_shape("b, l, d"), np.float32)] * 2
        )
    ),
    # under transformations
    bad("vmap of shapes that do not fit", ValueError, "a of shape (5, 3)", "b's shape, (5, 1)")(
        jax.vmap(scan), B, B[..., :1]
    ),
    bad("vmap of vectors", ValueError, "axis -2 is out of range for b of shape (3,)")(
        jax.vmap(scan), B[0], B[0]
    ),
    bad("vmap of unequal sizes", ValueError, "inconsistent sizes", "argument a", "argument b")(
        jax.vmap(scan), B, B[:1]
    ),
    bad("jit of a bad axis", ValueError, "axis 7 is out of range for b")(
        jax.jit(partial(scan, axis=7)), B, B
    ),
    bad("jit of a string", TypeError, "<class 'str'>", "path b")(jax.jit(scan), B, "x"),
    bad("grad by integers", TypeError, "int32")(
        jax.grad(lambda b: scan(B, b).sum()), B.astype(np.int32)
    ),
    bad("grad of an array", TypeError, "scalar", "(2, 5, 3)")(jax.grad(scan), B, B),
    bad("tangent of another shape", ValueError, "(2, 5, 3)", "(1, 5, 3)")(
        jax.jvp, scan, (B, B), (B, B[:1])
    ),
    bad("cotangent of another shape", ValueError, "float32[1,5,3]", "float32[2,5,3]")(
        lambda: jax.vjp(scan, B, B)[1](jnp.asarray(B[:1]))
    ),
    bad("transpose by the factors", NotImplementedError, "linear_scan is linear in ['b', 'h0']")(
        lambda: jax.linear_transpose(
            lambda a: _primitives.scan(R, {"a": a, "b": jnp.asarray(B)}, B.dtype)[0], B
        )(B)
    ),
    bad("two devices", ValueError, "incompatible devices")(
        lambda: scan(*(jax.device_put(B, d) for d in jax.devices("cpu")[:2]))
    ),
    # the other functions
    bad("save_scans of a number", TypeError, "policy must be a function", "got 1 of type int")(
        save_scans, 1
    ),
    bad("save_scans of a name", TypeError, "policy must be a function", "got 'dots' of type str")(
        save_scans, "dots"
    ),
    bad("kernels of a platform", TypeError, "kernels() takes 0")(
        lambda: jax_scan.kernels(*["cpu"])
    ),
    bad("export_checks of a target", TypeError, "export_checks() takes 0")(
        lambda: export_checks(*["scan"])
    ),
    bad("export without its checks", ValueError, "jax_scan.v1.scan")(
        lambda: export.export(jax.jit(scan))(B, B)
    ),
    bad("a platform without kernels", RuntimeError, "jax_scan has no tpu kernel here")(
        _native.module, "tpu"
    ),
]


@each(PYTHON)
def test_python(call):
    check(call)


# ---- Primitives ----------------------------------------------------------------------------------

R = Recurrence(1, 5, False, False, np.dtype(np.float32))
H = Result("h", (2, 5, 3), np.dtype(np.float32))


def bind(op, operands, results=(H,), recurrence=R):
    return op.primitive.bind(
        *map(jnp.asarray, operands.values()),
        operands=tuple(operands),
        results=results,
        recurrence=recurrence,
    )


# What the primitives refuse: the last line in Python, for whoever binds them directly.
BINDS = [
    bad("batches", Exception, "ncompatible shapes", "(2, 5, 3)", "(3, 5, 3)")(
        bind, SCAN, {"a": B, "b": np.ones((3, 5, 3), np.float32)}
    ),
    bad("length", ValueError, "length is 1, but the time axis has size 5")(
        bind, SCAN, {"a": B, "b": B}, recurrence=R._replace(length=1)
    ),
    bad("ranks", ValueError, "ranks must be equal", "time axis 1", "float32[5,3]")(
        bind, SCAN, {"a": B[0], "b": B}
    ),
    bad("axis", ValueError, "ranks must be equal and hold the time axis 3")(
        bind, SCAN, {"a": B, "b": B}, recurrence=R._replace(axis=3)
    ),
    bad("order", ValueError, "operands must be a and some of", "in this order")(
        bind, SCAN, {"b": B, "a": B}
    ),
    bad("no b", ValueError, "has_h0=False and an operand b")(bind, SCAN, {"a": B}),
    bad("h0 without has_h0", ValueError, "has_h0=False")(
        bind, SCAN, {"a": B, "b": B, "h0": B[:, :1]}
    ),
    bad("h0 with time", ValueError, "h0 must have size 1 in time and dtype float32")(
        bind, SCAN, {"a": B, "b": B, "h0": B}, recurrence=R._replace(has_h0=True)
    ),
    bad("no results", ValueError, "results must be some of", "got []")(
        bind, SCAN, {"a": B, "b": B}, results=()
    ),
    bad("result too small", ValueError, "h of shape (1, 5, 3) does not match the operands")(
        bind, SCAN, {"a": B, "b": B}, results=(H._replace(shape=(1, 5, 3)),)
    ),
    bad("tangent without dh", ValueError, "dh must be among the results, got ['dstate']")(
        bind, TANGENT, {"a": B, "db": B}, results=(H._replace(name="dstate", shape=(2, 1, 3)),)
    ),
    bad("da without h", ValueError, "h and, if the scan has one, h0 are needed with da")(
        bind, TANGENT, {"a": B, "da": B}, results=(H._replace(name="dh"),)
    ),
    bad("da wanted without h", ValueError, "h and, if the scan has one, h0 are needed with da")(
        bind, COTANGENT, {"a": B, "g": B}, results=(H._replace(name="da"),)
    ),
    bad("dh0 without h0", ValueError, "dh0 belongs to a scan with h0")(
        bind, TANGENT, {"a": B, "dh0": B[:, :1]}, results=(H._replace(name="dh"),)
    ),
    bad("complex in a real state", TypeError, "b can't have dtype complex64 with a float32 state")(
        bind, SCAN, {"a": B, "b": C}
    ),
    bad("integers", TypeError, "b can't have dtype int64")(
        bind, SCAN, {"a": B, "b": B.astype(int)}
    ),
    bad("double in a single state", TypeError, "b can't have dtype float64")(
        bind, SCAN, {"a": B, "b": B.astype(float)}
    ),
    bad("reset", TypeError, "reset must be bool")(bind, SCAN, {"a": B, "b": B, "reset": B}),
]


@each(BINDS)
def test_primitives(call):
    check(call)


# ---- Handlers ------------------------------------------------------------------------------------

Rejected = jax.errors.JaxRuntimeError
ffi = handlers.call


def rejected(name: str, *message: str) -> Callable[..., Bad]:
    """A call that the compiled module refuses, with a message that starts with its name."""

    def of(*args: Any, op: str = "scan", **changed: Any) -> Bad:
        return bad(name, Rejected, f"jax_scan.v1.{op}: ", *message)(ffi, *args, op=op, **changed)

    return of


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


STEP = B[:, :1]
WITH_H0 = {"operands": "a b h0", "has_h0": True}
WITH_RESET = {"operands": "a b reset"}
TANGENT_OF_B = {"op": "tangent", "operands": "a db", "results": "dh"}
COTANGENT_OF_B = {"op": "cotangent", "operands": "a g", "results": "db"}


def out(*shape: int, dtype: Any = np.float32) -> dict[str, Any]:
    """The option of `handlers.call` that asks for one result of this shape."""
    return {"shapes": ((shape, dtype),)}


HANDLERS = [
    # attributes: what XLA itself checks
    *(
        bad(f"no attribute {name}", Rejected, "INVALID_ARGUMENT", "expected 9 but got 8")(
            ffi, without=[name]
        )
        for name in handlers.ATTRIBUTES
    ),
    bad("one attribute too many", Rejected, "expected 9 but got 10", "threads")(ffi, threads=4),
    bad("an attribute by another name", Rejected, "axes vs axis")(ffi, without=["axis"], axes=1),
    bad("axis of 32 bits", Rejected, "expected S64 but got S32")(ffi, axis=np.int32(1)),
    bad("axis a float", Rejected, "expected S64 but got F64")(ffi, axis=1.0),
    bad("axis a string", Rejected, "expected scalar but got string")(ffi, axis="1"),
    bad("axis a bool", Rejected, "expected S64 but got PRED")(ffi, axis=True),
    bad("reverse a number", Rejected, "expected PRED but got S64")(ffi, reverse=1),
    bad("has_h0 a string", Rejected, "expected scalar but got string")(ffi, has_h0="no"),
    bad("state a number", Rejected, "expected string but got scalar")(ffi, state=32),
    bad("repeated a number", Rejected, "expected array but got scalar")(ffi, repeated=0),
    bad("repeated of 32 bits", Rejected, "expected S64 but got S32")(
        ffi, repeated=np.zeros(2, np.int32)
    ),
    bad("repeated of floats", Rejected, "expected S64 but got F64")(ffi, repeated=np.zeros(2)),
    bad("an unknown target", Rejected, "jax_scan.v0.scan")(ffi, op="jax_scan.v0.scan"),
    # attributes: what the handler checks
    rejected("operands that are not named", "'operands' names 1 operands, the call has 2")(
        operands="a"
    ),
    rejected("operands that are not there", "'operands' names 3 operands, the call has 2")(
        operands="a b h0"
    ),
    rejected("no names of operands", "'operands' names 0 operands")(operands=""),
    rejected("two blanks", "'operands' names 3 operands")(operands="a  b"),
    rejected("results that are not there", "attribute 'results' names")(results="h state"),
    rejected("an unknown operand", "operand 'c' is not one of this target's")(operands="a c"),
    rejected("a twice", "operand 'a' is given twice")(operands="a a"),
    rejected("no a", "operand 'a' is missing")(B, STEP, operands="b h0", has_h0=True),
    rejected("no b at all", "operand 'b' is missing")(B, operands="a"),
    rejected("an operand of another target", "operand 'b' is not one of this target's")(
        op="tangent", operands="a b", results="dh"
    ),
    rejected("an unknown result", "result 'da' is not one of this target's")(results="da"),
    rejected("h twice", "result 'h' is given twice")(
        results="h h", shapes=((B.shape, np.float32),) * 2
    ),
    rejected("state of 16 bits", "'state' must be float32, float64", "got 'bfloat16'")(
        state="bfloat16"
    ),
    rejected("an empty state", "'state' must be", "got ''")(state=""),
    rejected("axis beyond the rank", "'a' has shape (2, 5, 3), expected rank 3 with time axis 3")(
        axis=3
    ),
    rejected("a negative axis", "'axis' and 'length' must not be negative, got -1 and 5")(axis=-1),
    rejected("the least axis", "must not be negative, got -9223372036854775808")(axis=-(2**63)),
    rejected("a huge axis", "time axis 4611686018427387904")(axis=2**62),
    rejected("a negative length", "must not be negative, got 1 and -1")(length=-1),
    rejected("a length too short", "'a' has shape (2, 5, 3), which does not", "(2, 4, 1)")(
        length=4
    ),
    rejected("a length too long", "'a' has shape (2, 5, 3), which does not", "(2, 6, 1)")(length=6),
    rejected("no length", "'a' has shape (2, 5, 3), which does not broadcast")(length=0),
    rejected("a huge length", "4611686018427387904")(length=2**62),
    rejected("time last", "'a' has shape (2, 3, 5), which does not broadcast")(time_last=True),
    rejected("repeated too short", "'repeated' has 1 entries, the call has 2 operands")(
        repeated=np.zeros(1, np.int64)
    ),
    rejected("repeated in time", "operand 'a' can't be repeated in time")(
        repeated=np.array([2, 0])
    ),
    rejected("repeated everywhere", "operand 'a' can't be repeated")(repeated=np.array([-1, 0])),
    rejected("nothing repeated", "'a' is repeated in axis 0 of size 0")(
        ones(0, 5, 3), B, repeated=np.array([1, 0])
    ),
    rejected("has_h0 without h0", "operand 'h0' is missing", "'has_h0' is true")(has_h0=True),
    rejected("h0 without has_h0", "operand 'h0' is given", "'has_h0' is false")(
        B, B, STEP, operands="a b h0"
    ),
    # operands
    rejected("a of int8", "operand 'a' has dtype int8, which a float32 state can't read")(
        B.astype(np.int8), B
    ),
    rejected("a of bool", "operand 'a' has dtype bool")(B > 0, B),
    rejected("b of int64", "operand 'b' has dtype int64")(B, B.astype(np.int64)),
    rejected("b of uint16", "operand 'b' has dtype uint16")(B, B.astype(np.uint16)),
    rejected("b of float8", "operand 'b' has dtype number 20 of XLA's")(
        B, B.astype(ml_dtypes.float8_e4m3fn)
    ),
    rejected("b complex", "operand 'b' has dtype complex64, which a float32 state can't read")(
        B, C
    ),
    rejected("a double", "operand 'a' has dtype float64, which a float32 state can't read")(
        B.astype(np.float64), B
    ),
    rejected("reset of floats", "operand 'reset' must be bool, got float32")(B, B, B, **WITH_RESET),
    rejected("reset of bytes", "operand 'reset' must be bool, got int8")(
        B, B, B.astype(np.int8), **WITH_RESET
    ),
    rejected("reset too short", "'reset' has shape (2, 4, 1), which does not broadcast")(
        B, B, ones(2, 4, 1, dtype=bool), **WITH_RESET
    ),
    rejected("reset of another rank", "'reset' has shape (2, 5), expected rank 3")(
        B, B, ones(2, 5, dtype=bool), **WITH_RESET
    ),
    rejected("b of another rank", "'b' has shape (2, 5, 3), expected rank 2")(ones(2, 5), B),
    rejected("no axes", "'a' has shape (), expected rank 0 with time axis 0")(
        ones(), ones(), axis=0, length=1, **out()
    ),
    rejected("batches", "'b' has shape (2, 5, 3), which does not broadcast to (3, 5, 3)")(
        ones(3, 5, 3), B
    ),
    rejected("channels", "'b' has shape (2, 5, 3), which does not broadcast to (2, 5, 2)")(
        ones(2, 5, 2), B
    ),
    rejected("lengths", "'b' has shape (2, 4, 3), which does not broadcast")(B, ones(2, 4, 3)),
    rejected("h0 of 16 bits", "'h0' must have dtype float32 and size 1", "bfloat16")(
        B, B, STEP.astype(ml_dtypes.bfloat16), **WITH_H0
    ),
    rejected("h0 with time", "'h0' must have", "size 1 in time", "(2, 5, 3)")(B, B, B, **WITH_H0),
    rejected("h0 without its time axis", "'h0' has shape (2, 3), expected rank 3")(
        B, B, B[:, 0], **WITH_H0
    ),
    rejected("h0 of another batch", "'h0' has shape (3, 1, 3), which does not broadcast")(
        B, B, ones(3, 1, 3), **WITH_H0
    ),
    rejected("too many alternating axes", "operand 'a' alternates", "more than 6 times")(
        ones(*(1, 2) * 7, 1),
        ones(*(2,) * 14, 1),
        axis=14,
        length=1,
        **out(*(2,) * 14, 1),
    ),
    # results
    rejected("h too small", "result 'h' has shape (1, 5, 3), expected (2, 5, 3)")(**out(1, 5, 3)),
    rejected("h too large", "'h' has shape (4, 5, 3), which does not broadcast to (2, 5, 3)")(
        **out(4, 5, 3)
    ),
    rejected("h without time", "'h' has shape (2, 1, 3), expected (2, 5, 3)")(**out(2, 1, 3)),
    rejected("h too long", "'h' has shape (2, 6, 3), which does not broadcast")(**out(2, 6, 3)),
    rejected("h of another rank", "'h' has shape (2, 5), expected rank 3")(**out(2, 5)),
    rejected("h of int32", "'h' has dtype int32, in which a float32 state can't be stored")(
        **out(2, 5, 3, dtype=np.int32)
    ),
    rejected("h complex", "'h' has dtype complex64, in which a float32 state can't be stored")(
        **out(2, 5, 3, dtype=np.complex64)
    ),
    rejected("h double", "'h' has dtype float64, in which a float32 state")(
        **out(2, 5, 3, dtype=np.float64)
    ),
    rejected("state with time", "'state' has shape (2, 5, 3), expected (2, 1, 3)")(results="state"),
    rejected("state of 16 bits", "'state' has dtype bfloat16")(
        results="state", **out(2, 1, 3, dtype=ml_dtypes.bfloat16)
    ),
    rejected("a workspace alone", "neither 'h' nor 'state' is among the results")(
        results="workspace", **out(1 << 20, dtype=np.uint8)
    ),
    # the derivatives
    rejected("tangent without dh", "result 'dh' is missing")(
        op="tangent", operands="a db", results="dstate", **out(2, 1, 3)
    ),
    rejected("da without h", "operands 'h'", "are needed with 'da'")(
        op="tangent", operands="a da", results="dh"
    ),
    rejected("da without h0", "'h0' are needed with 'da'")(
        B, B, B, op="tangent", operands="a h da", results="dh", has_h0=True
    ),
    rejected("dh0 without has_h0", "operand 'dh0' is given", "'has_h0' is false")(
        B, STEP, op="tangent", operands="a dh0", results="dh"
    ),
    rejected("db of int32", "operand 'db' has dtype int32")(B, B.astype(np.int32), **TANGENT_OF_B),
    rejected("dh too small", "result 'dh' has shape (1, 5, 3)")(**TANGENT_OF_B, **out(1, 5, 3)),
    rejected("da wanted without h", "operands 'h'", "are needed with 'da'")(
        op="cotangent", operands="a g", results="da"
    ),
    rejected("dh0 of a scan without h0", "'dh0' is asked of a scan without h0")(
        op="cotangent", operands="a g", results="dh0", **out(2, 1, 3)
    ),
    rejected("da too small", "result 'da' has shape (1, 5, 1), expected (2, 5, 1)")(
        B, B, B, op="cotangent", operands="a h g", results="da", **out(1, 5, 1)
    ),
    rejected("da of few channels over the batch", "result 'da' is a sum over other axes")(
        B, B, B, op="cotangent", operands="a h g", results="da", **out(1, 5, 3)
    ),
    rejected("da of few channels over channels", "result 'da' is a sum over other axes")(
        B, B, B, op="cotangent", operands="a h g", results="da", **out(2, 5, 1)
    ),
    rejected("dh0 with time", "result 'dh0' has shape (2, 5, 3), expected (2, 1, 3)")(
        op="cotangent", operands="a g", results="dh0", has_h0=True
    ),
    rejected("db of int64", "result 'db' has dtype int64")(
        **COTANGENT_OF_B, **out(2, 5, 3, dtype=np.int64)
    ),
    rejected("gstate with time", "'gstate' must have", "size 1 in time", "(2, 5, 3)")(
        op="cotangent", operands="a gstate", results="db"
    ),
]


@each(HANDLERS)
def test_handlers(call):
    check(call)


@pytest.mark.gpu
@pytest.mark.parametrize("op", handlers.OPS)
def test_workspace_that_is_too_small(op):
    """Of long scans with few channels, which are cut in time and meet in the workspace."""
    x = ones(1, 65536, 4)
    needed = _native.module("cuda").workspace_bytes(op, 1, 65536, 4, "float32")
    names = {"scan": ("a b", "h"), "tangent": ("a db", "dh"), "cotangent": ("a g", "db")}
    operands, results = names[op]
    assert needed > 1
    for size in (0, 1, needed - 1):
        call = bad("", Rejected, "'workspace'", f"has {size} bytes, expected at least {needed}")
        check(
            call(
                ffi, x, x, op=op, operands=operands, results=results, length=65536,
                workspace=size, shapes=((x.shape, np.float32),),
            )
        )  # fmt: skip


@pytest.mark.gpu
def test_calls_without_elements_never_reach_the_gpu():
    empty = bad("", Rejected, "INVALID_ARGUMENT", "jax_scan")
    check(empty(ffi, B[:, :0], B[:, :0], length=0, **out(2, 0, 3)))
    check(empty(ffi, B[:0], B[:0], **out(0, 5, 3)))


# ---- Scans over devices --------------------------------------------------------------------------

X = ones(2, 16, 6)


def over(*spec: Any) -> dict[str, Any]:
    return {"sharding": NamedSharding(mesh(x=2, t=4), P(*spec))}


def parallel(a: Any = X, b: Any = X, spec: tuple = (None, "t"), **options: Any) -> Any:
    if "sharding" not in options and "axis_name" not in options:
        options |= over(*spec)
    return sequence_parallel_scan(a, b, **options)


def inside(**options: Any) -> Any:
    """A call within `jax.shard_map`."""
    split = P(None, "t")
    f = jax.shard_map(
        lambda x: parallel(x, x, **options),
        mesh=mesh(x=2, t=4),
        in_specs=split,
        out_specs=split,
    )
    return jax.jit(f)(X)


def on_mesh(kind: AxisType) -> Any:
    with jax.set_mesh(mesh(kind, t=4)):
        return parallel(axis_name="t")


SHARDING = "sharding must be a jax.sharding.NamedSharding, got "
AXIS_NAME = "axis_name 't' is not a mesh axis over which jax.shard_map has split"
PARALLEL = [
    bad(
        "a length that does not divide",
        ValueError,
        "the time axis of b has size 18, which does not divide over the 4 devices of mesh axis 't'",
    )(parallel, 1.0, ones(2, 18, 6)),
    bad("channels that do not divide", ValueError, "axis 1 of b has size 6", "the 4 devices")(
        parallel, 1.0, ones(4, 6, 2), spec=("x", "t"), axis=0
    ),
    bad("time that is not split", ValueError, "does not split the time axis 1 of b", "linear_scan")(
        parallel, spec=("t",)
    ),
    bad("too many axes", ValueError, "has more axes than b of shape (2, 16, 6)")(
        parallel, spec=(None, "t", None, "x")
    ),
    bad("a mesh as sharding", TypeError, f"{SHARDING}Mesh")(lambda: parallel(sharding=mesh(t=4))),
    bad("a spec as sharding", TypeError, f"{SHARDING}P")(parallel, sharding=P(None, "t")),
    bad("one device as sharding", TypeError, f"{SHARDING}SingleDeviceSharding")(
        lambda: parallel(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    ),
    bad(
        "an abstract mesh", ValueError, "sharding is over an abstract mesh, which names no devices"
    )(lambda: parallel(sharding=NamedSharding(mesh(t=4).abstract_mesh, P(None, "t")))),
    bad("both", TypeError, "give either axis_name", "or sharding")(
        lambda: parallel(axis_name="t", **over(None, "t"))
    ),
    bad("neither", TypeError, "give either axis_name", "or sharding")(parallel, sharding=None),
    bad("axis_name outside", ValueError, AXIS_NAME, "give sharding instead")(
        parallel, axis_name="t"
    ),
    bad("axis_name of an automatic mesh", ValueError, AXIS_NAME)(on_mesh, AxisType.Auto),
    bad("axis_name of an explicit mesh", ValueError, AXIS_NAME)(on_mesh, AxisType.Explicit),
    bad("axis_name a number", TypeError, "axis_name must be the name of a mesh axis", "got 3")(
        parallel, axis_name=3
    ),
    bad("no axis_name in it", TypeError, "axis_name must be the name of a mesh axis", "got ()")(
        parallel, axis_name=()
    ),
    bad("an unknown axis_name", ValueError, "axis_name 'nothing' is not a mesh axis")(
        inside, axis_name="nothing"
    ),
    bad("axis_name twice", ValueError, "axis_name has an axis twice: ('t', 't')")(
        inside, axis_name=("t", "t")
    ),
    bad("sharding inside", ValueError, "sharding can't be given inside jax.shard_map")(
        lambda: inside(**over(None, "t"))
    ),
    bad("a that does not broadcast", ValueError, "a of shape (2, 4, 6) does not broadcast")(
        parallel, ones(2, 4, 6)
    ),
    bad("axis out of range", ValueError, "axis 7 is out of range for b")(parallel, axis=7),
    bad("reset of floats", TypeError, "reset must have dtype bool, got float64")(
        parallel, reset=np.ones((2, 16))
    ),
    bad("reverse a number", TypeError, "reverse must be True or False, got 1")(parallel, reverse=1),
    bad("b of integers", TypeError, f"b {DTYPES}, got int64")(parallel, 1.0, X.astype(int)),
    bad("no b", TypeError, f"b {KINDS}, got None")(parallel, 1.0, None),
]


@each(PARALLEL)
def test_over_devices(call):
    check(call)


# ---- torch ---------------------------------------------------------------------------------------


def torch_calls(device: str) -> list[Bad]:
    from jax_scan.torch import ModelNew, Reference
    from jax_scan.torch import linear_scan as scan

    x = torch.ones(2, 5, 3, device=device)
    name = "must have one of the dtypes"
    calls = [
        bad("a of int32", TypeError, f"a {name}", "torch.int32")(scan, x.int(), x),
        bad("b of bool", TypeError, f"b {name}", "torch.bool")(scan, x, x > 0),
        bad("h0 of uint8", TypeError, f"h0 {name}", "torch.uint8")(scan, x, x, x[:, 0].byte()),
        bad("a a NumPy array", TypeError, "a must be a torch tensor", "ndarray")(scan, B, x),
        bad("b a JAX array", TypeError, "b must be a torch tensor", "ArrayImpl")(
            scan, x, jnp.asarray(B)
        ),
        bad("a a number", TypeError, "a must be a torch tensor", "float")(scan, 0.5, x),
        bad("b None", TypeError, "b must be a torch tensor", "NoneType")(scan, x, None),
        bad("h0 a number", TypeError, "h0 must be a torch tensor", "int")(scan, x, x, 0),
        bad("reset of floats", TypeError, "reset must be a torch.bool tensor", "torch.float32")(
            scan, x, x, reset=x[..., 0]
        ),
        bad("reset a list", TypeError, "reset must be a torch.bool tensor", "list")(
            scan, x, x, reset=[True]
        ),
        bad("out_dtype int64", TypeError, "out_dtype must be among", "torch.int64")(
            scan, x, x, out_dtype=torch.int64
        ),
        bad("out_dtype of NumPy", TypeError, "out_dtype must be among", "float32")(
            scan, x, x, out_dtype=np.float32
        ),
        bad("complex to real", TypeError, "out_dtype", "complex64")(
            scan, x.cfloat(), x, out_dtype=torch.float32
        ),
        bad("complex h0", TypeError, "h0 is complex64")(scan, x, x, x[:, 0].cfloat()),
        bad("axis out of range", ValueError, "axis 3 is out of range for b")(scan, x, x, axis=3),
        bad("axis a float", TypeError, "axis must be an int, got 1.0")(scan, x, x, axis=1.0),
        bad("axis a bool", TypeError, "axis must be an int, got True")(scan, x, x, axis=True),
        bad("rank 1", ValueError, "axis -2 is out of range for b", "axis=-1")(
            scan, x[0, 0], x[0, 0]
        ),
        bad("no axes", ValueError, "b must have a time axis, got a scalar")(
            scan, x[0, 0, 0], x[0, 0, 0]
        ),
        bad("reverse a string", TypeError, "reverse must be True or False, got 'no'")(
            scan, x, x, reverse="no"
        ),
        bad("return_state a number", TypeError, "return_state must be True or False, got 1")(
            scan, x, x, return_state=1
        ),
        bad("a too short", ValueError, "a of shape (2, 4, 3) does not broadcast")(
            scan, x[:, :4], x
        ),
        bad("a of higher rank", ValueError, "a of shape (2, 5, 3) does not broadcast")(
            scan, x, x[0]
        ),
        bad("h0 with time", ValueError, "h0 of shape (2, 5, 3) does not broadcast")(scan, x, x, x),
        bad("reset with channels", ValueError, "reset of shape (2, 5, 3) does not broadcast")(
            scan, x, x, reset=x > 0
        ),
        bad("sparse", TypeError, "tensors must be strided", "torch.sparse_coo")(
            scan, x, x.to_sparse()
        ),
        bad("no storage", RuntimeError, "tensors on meta cannot be handed to JAX")(
            scan, x.to("meta"), x.to("meta")
        ),
        bad("two devices", ValueError, "one device", "meta")(scan, x, x.to("meta")),
        bad("no d_model", TypeError, "d_model")(ModelNew),
    ]
    for model in (ModelNew(3), Reference(3)):
        kind = type(model).__name__
        shape = "a and b must both have shape (B, L, 3), got "
        calls += [
            bad(f"{kind}: channels", ValueError, f"{shape}(2, 5, 2)")(
                model, x[..., :2], x[..., :2]
            ),
            bad(f"{kind}: batches", ValueError, f"{shape}(2, 5, 3) and (1, 5, 3)")(model, x, x[:1]),
            bad(f"{kind}: rank", ValueError, f"{shape}(5, 3) and (5, 3)")(model, x[0], x[0]),
            bad(f"{kind}: no tensor", TypeError, "b must be a torch tensor", "ndarray")(
                model, x, B
            ),
            bad(f"{kind}: one argument", TypeError, "'b'")(model, x),
        ]
    return calls


TORCH_DEVICES = ["cpu", "cuda"] if torch and torch.cuda.is_available() else ["cpu"]


@pytest.mark.skipif(torch is None, reason="needs torch")
@each(
    [c._replace(name=f"{d}: {c.name}") for d in TORCH_DEVICES for c in torch_calls(d)]
    if torch
    else []
)
def test_torch(call):
    check(call)


def test_the_catalogue_is_long():
    names = [call.name for calls in (PYTHON, BINDS, HANDLERS, PARALLEL) for call in calls]
    assert len(names) > 100
