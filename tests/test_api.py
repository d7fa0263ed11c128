"""What `linear_scan` accepts and returns, and what importing the package does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, Case, arguments
from jax import export
from oracles import Oracle, check, same, state_dtype

import jax_scan
from jax_scan import linear_scan


def test_public_names():
    assert set(jax_scan.__all__) == {
        "linear_scan",
        "sequence_parallel_scan",
        "kernels",
        "export_checks",
        "save_scans",
    }


def test_X8_import_starts_no_backend_and_loads_no_torch(python):
    out = python(
        "import sys, jax_scan\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized(), 'torch' in sys.modules)"
    )
    assert out.split() == ["False", "False"]


def test_X5_import_after_the_backend_has_started(python):
    out = python(
        "import jax; jax.devices(); import jax_scan\n"
        "print(jax_scan.linear_scan(2.0, jax.numpy.ones(3), axis=-1))"
    )
    assert out.strip() == "[1. 3. 7.]"


def test_X5_cpu_kernel_wherever_the_cpu_is_the_default_device():
    with jax.default_device(jax.devices("cpu")[0]):
        np.testing.assert_array_equal(linear_scan(2.0, np.ones(3), axis=-1), [1, 3, 7])


def test_kernels():
    assert set(jax_scan.kernels()) == {"cpu", "cuda"}
    assert jax_scan.kernels()["cpu"] == "available"
    assert jax_scan.kernels()["cuda"]


@pytest.mark.gpu
def test_cuda_kernel_is_there_on_a_gpu_machine():
    assert jax_scan.kernels()["cuda"] == "available"


def test_export_checks_name_every_target():
    assert all(isinstance(c, export.DisabledSafetyCheck) for c in jax_scan.export_checks())
    names = {str(c).rpartition(".")[2] for c in jax_scan.export_checks()}
    assert names == {"scan", "tangent", "cotangent", "summary"}


def test_docstring_example():
    h = linear_scan(0.5, jnp.ones(4), axis=-1)
    np.testing.assert_array_equal(h, [1, 1.5, 1.75, 1.875])


@pytest.mark.parametrize("a", [0.5, 1, 0.5j, np.float32(0.5), np.float64(0.5), jnp.float32(0.5)])
def test_numbers_as_factors(a):
    b = np.arange(1, 13, dtype=np.float32).reshape(2, 3, 2)
    with jax.numpy_dtype_promotion("standard"):
        h = linear_scan(a, b)
        # A Python number adapts to b; NumPy's scalars have a dtype of their own, as elsewhere in
        # JAX.
        assert h.dtype == jnp.result_type(jnp.asarray(a) if not isinstance(a, int) else float(a), b)
    assert not jax.typeof(h).weak_type
    check(h, Oracle(np.asarray(a, h.dtype), b, out_dtype=h.dtype).values()[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_dtypes_work_under_strict_promotion(dtype):
    case = Case("", (2, 4, 3), h0=(2, 3))
    a, b, h0, _ = arguments(case, dtype)
    h, state = linear_scan(a, b, h0, return_state=True)
    assert (h.dtype, state.dtype) == (b.dtype, state_dtype(dtype))
    assert linear_scan(0.5, b).dtype == b.dtype
    assert linear_scan(a, b, 0.0).dtype == b.dtype


def test_mixed_dtypes_follow_the_promotion_in_force():
    a, b = np.ones(3, np.float32), np.ones((2, 3), np.float16)
    with pytest.raises(Exception, match="promotion"):
        linear_scan(a, b)
    assert linear_scan(a, b, out_dtype=jnp.float16).dtype == np.float16
    with jax.numpy_dtype_promotion("standard"):
        assert linear_scan(a, b).dtype == np.float32


def test_weakly_typed_arrays():
    weak = jnp.full((2, 3, 2), 0.5)
    assert jax.typeof(weak).weak_type
    h, state = linear_scan(weak, weak, return_state=True)
    assert (h.dtype, state.dtype) == (np.float64, np.float64)
    assert not jax.typeof(h).weak_type
    b = np.ones((2, 3, 2), DTYPES["bfloat16"])
    h, state = linear_scan(weak, b, return_state=True)
    assert (h.dtype, state.dtype) == (b.dtype, np.float32)
    h, state = linear_scan(b, weak, return_state=True)
    assert (h.dtype, state.dtype) == (b.dtype, np.float32)


def test_without_x64(python):
    out = python(
        "import jax, numpy as np, jax_scan\n"
        "a = np.full((2, 3, 1), 0.5)\n"
        "h, s = jax_scan.linear_scan(a, a, return_state=True)\n"
        "print(h.dtype, s.dtype, jax_scan.linear_scan(a, a, a[:, 0], out_dtype=float).dtype,\n"
        "      jax_scan.linear_scan(0.5, a.astype('float16')).dtype,\n"
        "      jax_scan.linear_scan(0.5j, a).dtype)",
        JAX_ENABLE_X64="0",
    )
    assert out.split() == ["float32", "float32", "float32", "float16", "complex64"]


def test_V1_any_axis_is_the_same_scan():
    case = Case("", (2, 7, 3), h0=(2, 3))
    a, b, h0, _ = arguments(case)
    expected, state = linear_scan(a, b, h0, return_state=True)
    for to in range(3):
        moved = [np.moveaxis(x, 1, to) for x in (a, b)]
        for axis in (to, np.int64(to - 3)):
            given: Any = {"axis": axis}
            h, s = linear_scan(moved[0], moved[1], h0, return_state=True, **given)
            same(jnp.moveaxis(h, to, 1), expected)
            same(s, state)


def test_D1_numpy_views():
    case = Case("", (4, 12, 6))
    a, b, *_ = arguments(case)
    for view in (
        lambda x: x[:, ::-1],
        lambda x: x[::2, 1::3],
        lambda x: x.transpose(0, 2, 1),
        lambda x: np.broadcast_to(x[:1], x.shape),
    ):
        check(linear_scan(view(a), view(b)), Oracle(view(a), view(b)).values()[0])


def test_jax_array_protocol():
    class Wrapped:
        def __init__(self, x):
            self.x = x

        def __jax_array__(self):
            return jnp.asarray(self.x)

    b = np.ones((3, 2))
    wrapped: Any = Wrapped(b)
    np.testing.assert_array_equal(linear_scan(wrapped, wrapped), linear_scan(b, b))


def test_h0_and_reset_broadcast():
    case = Case("", (2, 3, 5, 4))
    a, b, *_ = arguments(case)
    rng = np.random.default_rng(0)
    for shape in ((), (4,), (3, 4), (1, 1), (2, 1, 4), (2, 3, 4)):
        h0 = rng.normal(size=shape).astype(np.float32)
        check(linear_scan(a, b, h0), Oracle(a, b, h0).values()[0])
    for shape in ((), (5,), (3, 5), (3, 1), (2, 3, 5)):
        reset = rng.uniform(size=shape) < 0.3
        check(linear_scan(a, b, reset=reset), Oracle(a, b, reset=reset).values()[0])
    np.testing.assert_array_equal(linear_scan(a, b, reset=True), b)
    np.testing.assert_array_equal(linear_scan(a, b, reset=False), linear_scan(a, b))


def test_h0_is_converted_to_the_state():
    a = b = np.ones((2, 3), np.float32)
    for h0 in (2, 2.0, np.float64(2), np.full(3, 2, DTYPES["bfloat16"])):
        h, state = linear_scan(a, b, h0, return_state=True)
        assert (h.dtype, state.dtype) == (np.float32, np.float32)
        np.testing.assert_array_equal(state, 4)
    h = linear_scan(a.astype(np.complex64), b.astype(np.complex64), np.float32(2))
    np.testing.assert_array_equal(h[-1], 4)


def test_state_is_the_last_in_scan_order():
    case = Case("", (2, 7, 3))
    a, b, *_ = arguments(case)
    h, state = linear_scan(a, b, return_state=True)
    np.testing.assert_array_equal(state, h[:, -1])
    h, state = linear_scan(a, b, reverse=True, return_state=True)
    np.testing.assert_array_equal(state, h[:, 0])


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 4, 3), (2, 4, 0), (0, 0, 0)])
def test_E1_empty(shape):
    b = np.ones(shape, DTYPES["bfloat16"])
    step = (shape[0], shape[2])
    h, state = linear_scan(b, b, return_state=True)
    assert (h.shape, h.dtype) == (shape, b.dtype)
    assert (state.shape, state.dtype) == (step, np.float32)
    np.testing.assert_array_equal(state, 0)
    h0 = np.full(step, 3.0, np.float32)
    h, state = linear_scan(b, b, h0, return_state=True, reverse=True)
    assert h.shape == shape
    if shape[1] == 0:
        np.testing.assert_array_equal(state, 3)


def test_out_dtype():
    a = b = np.full((2, 3), 0.3, np.float32)
    for dtype, state in (
        ("bfloat16", np.float32),
        (jnp.float16, np.float32),
        (np.float64, np.float64),
        (complex, np.complex128),
        (jnp.complex64, np.complex64),
    ):
        h, last = linear_scan(a, b, out_dtype=dtype, return_state=True)
        assert (h.dtype, last.dtype) == (jnp.dtype(dtype), state)
        check(h, Oracle(a, b, out_dtype=jnp.dtype(dtype)).values()[0])


def test_inputs_stay_as_they_were():
    case = Case("", (2, 9, 3))
    a, b, *_ = arguments(case)
    x, y = jnp.asarray(a), jnp.asarray(b)
    linear_scan(x, y)
    np.testing.assert_array_equal(x, a)
    np.testing.assert_array_equal(y, b)
