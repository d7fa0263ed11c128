"""Bad input: the message names the argument, what it got and what it must be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_scan import _primitives, linear_scan
from jax_scan._primitives import COTANGENT, SCAN, TANGENT
from jax_scan._reference import Recurrence, Result

B = np.ones((2, 5, 3), np.float32)
C = B.astype(np.complex64)


def bad(name, error, message, *args, **kwargs):
    return pytest.param(error, message, args, kwargs, id=name)


BAD = [
    # dtypes
    bad(
        "integer a",
        TypeError,
        r"a must have one of the dtypes .*float32.*, got int32",
        B.astype(np.int32),
        B,
    ),
    bad("bool a", TypeError, r"a must have .* got bool", B > 0, B),
    bad("integer b", TypeError, r"b must have .* got int8", B, B.astype(np.int8)),
    bad("bool number", TypeError, r"a must be .* got True of type bool", True, B),
    bad("strings", TypeError, r"b must have .* got <U1", B, np.array(["x"])),
    bad("integer h0", TypeError, r"h0 must have .* got int64", B, B, np.ones((2, 3), np.int64)),
    bad(
        "complex h0", TypeError, r"h0 is complex64, but a .* make the state float32", B, B, C[:, 0]
    ),
    bad(
        "integer reset",
        TypeError,
        r"reset must have dtype bool, got int64",
        B,
        B,
        reset=np.ones(5, int),
    ),
    bad(
        "number as reset",
        TypeError,
        r"reset must be a boolean array, got 1 of type int",
        B,
        B,
        reset=1,
    ),
    bad(
        "integer out_dtype",
        TypeError,
        r"out_dtype must have .* got int32",
        B,
        B,
        out_dtype=np.int32,
    ),
    bad(
        "array as out_dtype",
        TypeError,
        r"out_dtype must be a dtype, got an array",
        B,
        B,
        out_dtype=B,
    ),
    bad("huge int", ValueError, r"a is an int beyond the range", 10**400, B),
    bad("no out_dtype", TypeError, r"out_dtype must have .* got x", B, B, out_dtype="x"),
    bad(
        "complex to real",
        TypeError,
        r"out_dtype is float32, but a \(complex64\)",
        C,
        B,
        out_dtype="float32",
    ),
    # kinds
    bad(
        "None as a",
        TypeError,
        r"a must be a JAX or NumPy array or a Python number, got None",
        None,
        B,
    ),
    bad("None as b", TypeError, r"b must be .* got None", B, None),
    bad("list", TypeError, r"a must be .* of type list", [0.5], B),
    bad(
        "axis is a float", TypeError, r"axis must be an int, got 1.0 of type float", B, B, axis=1.0
    ),
    bad("axis is a bool", TypeError, r"axis must be an int, got True", B, B, axis=True),
    bad("axis is None", TypeError, r"axis must be an int, got None", B, B, axis=None),
    bad("reverse is a number", TypeError, r"reverse must be True or False, got 1", B, B, reverse=1),
    bad(
        "return_state is None",
        TypeError,
        r"return_state must be .* got None",
        B,
        B,
        return_state=None,
    ),
    # shapes
    bad(
        "axis too large",
        ValueError,
        r"axis 3 is out of range for b of shape \(2, 5, 3\)",
        B,
        B,
        axis=3,
    ),
    bad("axis too small", ValueError, r"axis -4 is out of range", B, B, axis=-4),
    bad(
        "rank 1",
        ValueError,
        r"axis -2 is out of range for b of shape \(3,\); .* axis=-1",
        B[0, 0],
        B[0, 0],
    ),
    bad("scalar b", ValueError, r"b must have a time axis, got a scalar", 0.5, 0.5, axis=-1),
    bad(
        "a too long",
        ValueError,
        r"a of shape \(2, 5, 3\) does not broadcast to b's shape, \(2, 5, 1\)",
        B,
        B[..., :1],
    ),
    bad("a of higher rank", ValueError, r"a of shape \(2, 5, 3\) does not .*, \(5, 3\)", B, B[0]),
    bad("a of another length", ValueError, r"a of shape \(2, 4, 3\) does not", B[:, 1:], B),
    bad(
        "h0 with time",
        ValueError,
        r"h0 of shape \(2, 5, 3\) does not .* without the time axis, \(2, 3\)",
        B,
        B,
        B,
    ),
    bad("h0 too long", ValueError, r"h0 of shape \(5,\) does not", B, B, B[0, :, 0]),
    bad(
        "reset with channels",
        ValueError,
        r"reset of shape \(2, 5, 3\) does not .* up to the time axis, \(2, 5\)",
        B,
        B,
        reset=B > 0,
    ),
    bad(
        "reset too long",
        ValueError,
        r"reset of shape \(4,\) does not",
        B,
        B,
        reset=np.ones(4, bool),
    ),
]


@pytest.mark.parametrize(("error", "message", "args", "kwargs"), BAD)
def test_bad_input(error, message, args, kwargs):
    with pytest.raises(error, match=message):
        linear_scan(*args, **kwargs)


def test_traced_where_static():
    for name in ("axis", "reverse", "return_state"):
        with pytest.raises(TypeError, match=rf"{name} must be .* traced by JAX"):
            jax.jit(lambda x, name=name: linear_scan(B, B, **{name: x}))(1)


def test_errors_are_the_same_under_transformations():
    with pytest.raises(ValueError, match=r"does not broadcast to b's shape, \(5, 1\)"):
        jax.vmap(linear_scan)(B, B[..., :1])
    with pytest.raises(TypeError, match=r"integer|int32"):
        jax.grad(lambda b: linear_scan(B, b).sum())(B.astype(np.int32))


def test_random_keys_are_refused():
    with pytest.raises(TypeError, match="b must have one of the dtypes"):
        linear_scan(0.5, jax.random.split(jax.random.key(0), 3), axis=-1)


def test_D1_committed_to_different_devices(python):
    out = python(
        """
        import jax, numpy as np, jax_scan
        x, y = (jax.device_put(np.ones((2, 5, 3)), d) for d in jax.devices())
        try:
            jax_scan.linear_scan(x, y)
        except ValueError as error:
            print(error)
        """,
        JAX_NUM_CPU_DEVICES="2",
    )
    assert "incompatible devices" in out


# What the primitives themselves refuse: the last line in Python, for whoever binds them directly.
R = Recurrence(1, 5, False, False, np.dtype(np.float32))
H = Result("h", (2, 5, 3), np.dtype(np.float32))
RAW = {
    "a batch of another size": (
        SCAN,
        {"a": B, "b": np.ones((3, 5, 3), np.float32)},
        (H,),
        R,
        "[Ii]ncompatible shapes",
    ),
    "another length": (SCAN, {"a": B, "b": B}, (H,), R._replace(length=1), "length is 1"),
    "ranks": (SCAN, {"a": B[0], "b": B}, (H,), R, "ranks must be equal"),
    "axis": (SCAN, {"a": B, "b": B}, (H,), R._replace(axis=3), "time axis 3"),
    "order": (SCAN, {"b": B, "a": B}, (H,), R, "in this order"),
    "no b": (SCAN, {"a": B}, (H,), R, "operand b"),
    "h0 without has_h0": (SCAN, {"a": B, "b": B, "h0": B[:, :1]}, (H,), R, "has_h0=False"),
    "h0 with time": (
        SCAN,
        {"a": B, "b": B, "h0": B},
        (H,),
        R._replace(has_h0=True),
        "size 1 in time",
    ),
    "no results": (SCAN, {"a": B, "b": B}, (), R, "results must be some of"),
    "result too small": (
        SCAN,
        {"a": B, "b": B},
        (H._replace(shape=(1, 5, 3)),),
        R,
        "does not match",
    ),
    "da without h": (TANGENT, {"a": B, "da": B}, (H._replace(name="dh"),), R, "needed with da"),
    "da wanted without h": (
        COTANGENT,
        {"a": B, "g": B},
        (H._replace(name="da"),),
        R,
        "needed with da",
    ),
    "dh0 without h0": (TANGENT, {"a": B, "dh0": B[:, :1]}, (H._replace(name="dh"),), R, "with h0"),
    "complex in a real state": (SCAN, {"a": B, "b": C}, (H,), R, "can't have dtype complex64"),
    "integers": (SCAN, {"a": B, "b": B.astype(int)}, (H,), R, "can't have dtype int64"),
    "double in a single state": (
        SCAN,
        {"a": B, "b": B.astype(float)},
        (H,),
        R,
        "can't have dtype float64",
    ),
    "reset": (SCAN, {"a": B, "b": B, "reset": B}, (H,), R, "reset must be bool"),
}


@pytest.mark.parametrize("name", RAW)
def test_raw_bind(name):
    op, operands, results, recurrence, message = RAW[name]
    with pytest.raises((TypeError, ValueError), match=message):
        op.primitive.bind(
            *map(jnp.asarray, operands.values()),
            operands=tuple(operands),
            results=results,
            recurrence=recurrence,
        )


def test_a_scan_is_not_linear_in_its_factors():
    with pytest.raises(NotImplementedError, match="linear_scan is linear in"):
        jax.linear_transpose(
            lambda a: _primitives.scan(R, {"a": a, "b": jnp.asarray(B)}, B.dtype)[0], B
        )(B)
