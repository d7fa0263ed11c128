"""JAX's modes: 64 bits on and off, promotion, NaN checks, no jit, weak types, internal checks."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments
from oracles import Oracle, check, same
from programs import lax_scan

from jax_scan import linear_scan

CASE = Case("", (2, 5, 3), h0=(2, 3))


def given(dtype="float64"):
    return tuple(jnp.asarray(x) for x in arguments(CASE, dtype)[:3] if x is not None)


def everything(scan, a, b, h0):
    """Values and derivatives of both orders, with resets."""
    f = partial(scan, reset=np.arange(5) == 3, return_state=True)

    def loss(*x):
        h, state = f(*x)
        return jnp.sum(jnp.sin(h)) + jnp.sum(state**2)

    grad = jax.grad(loss, (0, 1, 2))
    x = (a, b, h0)
    return f(*x), jax.jvp(f, x, x), grad(*x), jax.jvp(grad, x, x)[1]


def all_same(actual, expected):
    jax.tree.map(same, actual, expected)


def test_disable_jit():
    """Everything runs eagerly, each operation on its own."""
    x = given()
    expected = jax.jit(partial(everything, lax_scan))(*x)
    empty = jnp.ones((2, 0, 3))
    with jax.disable_jit():
        all_same(everything(linear_scan, *x), expected)
        assert linear_scan(empty, empty).shape == empty.shape
        mapped = jax.vmap(partial(linear_scan, reverse=True), (None, 0, None))(
            x[0], x[1][None], x[2]
        )
    same(mapped[0], lax_scan(*x, reverse=True))


def test_debug_nans():
    """Raised where a NaN arises, in values and in gradients, jitted or not; nowhere else."""
    a, b, h0 = given()
    bad, infinite = (b.at[0, 3, 1].set(x) for x in (jnp.nan, jnp.inf))
    cut, reset = a.at[:, np.array([0, 3])].set(jnp.nan), np.arange(5) == 3
    with jax.debug_nans(True):
        everything(linear_scan, a, b, h0)
        for f in (linear_scan, jax.jit(linear_scan)):
            with pytest.raises(FloatingPointError):
                f(a, bad)
        # sqrt' is infinite where h is 0, and 0 times infinity is not a number.
        with pytest.raises(FloatingPointError):
            jax.grad(lambda b: jnp.sum(jnp.sqrt(linear_scan(a, b))))(0 * b)
        # What is not read does no harm: the first factor, and one at a reset.
        h, pull = jax.vjp(lambda *x: linear_scan(*x, reset=reset), cut, b)
        pull(h)
    with jax.debug_infs(True), pytest.raises(FloatingPointError):
        linear_scan(a, infinite)


def test_internal_checks_and_leaks():
    """JAX's own consistency checks of every jaxpr, and its search for tracers that escape."""
    x = given()
    expected = jax.jit(partial(everything, lax_scan))(*x)
    with jax.enable_checks(True):
        all_same(jax.jit(partial(everything, linear_scan))(*x), expected)
        all_same(everything(linear_scan, *x), expected)
        mapped = jax.jit(jax.vmap(partial(everything, linear_scan), (None, 0, None)))
        jax.tree.map(
            lambda one, other: same(one[0], other), mapped(x[0], x[1][None], x[2]), expected
        )
    with jax.checking_leaks():
        all_same(jax.jit(partial(everything, linear_scan))(*x), expected)


@pytest.mark.parametrize("promotion", ["strict", "standard"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_derivatives_under_either_promotion(dtype, promotion):
    a, b, h0 = given(dtype)
    h0 = h0.astype(np.complex64 if dtype == "complex64" else np.float32)
    with jax.numpy_dtype_promotion(promotion):

        def loss(*x):
            h, state = linear_scan(*x, return_state=True)
            return jnp.sum(jnp.abs(h)) + jnp.sum(jnp.abs(state)).astype(jnp.abs(h).dtype)

        grads = jax.jit(jax.grad(loss, (0, 1, 2)))(a, b, h0)
        assert [g.dtype for g in grads] == [a.dtype, b.dtype, h0.dtype]
        dots = jax.jvp(jax.grad(loss, (0, 1, 2)), (a, b, h0), (a, b, h0))[1]
        assert [g.dtype for g in dots] == [a.dtype, b.dtype, h0.dtype]
        if dtype != "bfloat16":
            wide = [np.asarray(x, np.result_type(x.dtype, np.float64)) for x in (a, b, h0)]
            expected = jax.grad(loss_of_lax_scan, (0, 1, 2))(*wide)
            for x, y in zip(grads, expected, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def loss_of_lax_scan(*x):
    h, state = lax_scan(*x, return_state=True)
    return jnp.sum(jnp.abs(h)) + jnp.sum(jnp.abs(state))


def test_derivatives_without_x64(python):
    """float64 data becomes float32, and so do its derivatives of every order."""
    out = python(
        """
        import jax, jax.numpy as jnp, numpy as np
        from jax_scan import linear_scan
        jax.config.update("jax_numpy_dtype_promotion", "strict")
        rng = np.random.default_rng(0)
        x = rng.uniform(0.5, 1, (2, 6, 2)), rng.normal(size=(2, 6, 2)), rng.normal(size=(2, 2))
        loss = lambda *x: jnp.sum(jnp.sin(linear_scan(*x, reset=np.arange(6) == 3)))
        grads = jax.grad(loss, (0, 1, 2))(*x)
        dots = jax.jvp(jax.grad(loss, (0, 1, 2)), x, x)[1]
        hessian = jax.hessian(loss)(*x)
        mapped = jax.vmap(jax.grad(loss))(*(v[None] for v in x))
        print(*{v.dtype.name for v in (*grads, *dots, hessian, mapped)})
        h = np.zeros((2, 2)) + x[2]
        total = 0.0
        for t in range(6):
            h = x[1][:, t] if t == 3 else x[0][:, t] * h + x[1][:, t]
            total += np.sin(h).sum()
        np.testing.assert_allclose(loss(*x), total, rtol=1e-5)
        """,
        JAX_ENABLE_X64="0",
    )
    assert out.split() == ["float32"]


def test_weak_types_do_not_spread():
    """Results and gradients of weakly typed arguments; a gradient has its argument's own type."""
    a, b = jnp.full((2, 5, 3), 0.5), given("float32")[1]
    assert jax.typeof(a).weak_type
    h, pull = jax.vjp(linear_scan, a, b)
    assert h.dtype == b.dtype
    assert not jax.typeof(h).weak_type
    da, db = pull(h)
    assert (da.dtype, db.dtype) == (a.dtype, b.dtype)
    oracle = Oracle(np.asarray(a, np.float32), b, out_dtype=np.float32)
    check(h, oracle.values()[0])
    check(db, oracle.cotangents(h)["b"])
    number = jax.grad(lambda a: jnp.sum(linear_scan(a, b)))(0.5)
    np.testing.assert_allclose(
        number, jax.grad(lambda a: jnp.sum(lax_scan(a, b.astype(float))))(0.5), rtol=1e-5
    )
    traced = []

    @jax.jit
    def f(a):
        traced.append(a)
        return linear_scan(a, b)

    np.testing.assert_array_equal(f(0.5), linear_scan(0.5, b))
    np.testing.assert_array_equal(f(0.25), linear_scan(0.25, b))
    assert len(traced) == 1


def test_matmul_precision_and_default_device_do_not_matter():
    x = given("float32")
    expected = linear_scan(*x)
    with jax.default_matmul_precision("bfloat16"), jax.default_device(jax.devices()[0]):
        np.testing.assert_array_equal(linear_scan(*x), expected)


def test_transfer_guard():
    """A call on device arrays moves nothing to or from the host."""
    x = given()
    f = jax.jit(partial(everything, linear_scan))
    f(*x)
    with jax.transfer_guard("disallow"):
        f(*x)
        linear_scan(*x, return_state=True)
