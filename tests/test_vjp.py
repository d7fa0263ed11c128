"""Reverse mode: gradients of every order, and that nothing is computed that nobody asked for."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments, normal
from jax.test_util import check_grads
from oracles import Oracle, check, same
from programs import lax_scan, scans

from jax_scan import linear_scan

TINY = Case("", (2, 5, 3), h0=(2, 3))


def given(case=TINY, dtype="float64"):
    a, b, h0, _ = arguments(case, dtype)
    return tuple(jnp.asarray(x) for x in (a, b, h0) if x is not None)


VARIANTS = {
    "plain": (Case("", (2, 4, 2)), {}),
    "h0, reversed": (Case("", (2, 4, 2), h0=(2, 2)), {"reverse": True}),
    "h0 and state": (Case("", (2, 4, 2), h0=(2,)), {"return_state": True}),
    "reset": (Case("", (1, 5, 2), h0=(1, 2)), {"reset": np.array([0, 0, 1, 0, 0], bool)}),
    "reset, no h0": (
        Case("", (1, 5, 2)),
        {"reset": np.array([0, 0, 1, 0, 0], bool), "reverse": True},
    ),
    "shared a": (Case("", (2, 4, 3), a=(3,), h0=(3,)), {}),
    "shared a, time last": (Case("", (2, 3, 4), a=(2, 1, 1), h0=()), {"axis": -1}),
    "one step": (Case("", (2, 1, 2), h0=(2, 2)), {}),
    "one step, no h0": (Case("", (2, 1, 2)), {}),
}


@pytest.mark.parametrize("mode", ["fwd", "rev"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_check_grads_to_second_order(variant, mode):
    case, options = VARIANTS[variant]
    check_grads(jax.jit(partial(linear_scan, **options)), given(case), order=2, modes=[mode])


THIRD = {
    "plain": (Case("", (1, 3, 1), h0=(1, 1)), {}),
    "reset, reversed": (
        Case("", (4, 1), h0=(1,)),
        {"reverse": True, "reset": np.array([0, 0, 1, 0], bool)},
    ),
    "shared a, state": (Case("", (3, 2), a=(1, 2)), {"return_state": True}),
}


@pytest.mark.parametrize("mode", ["fwd", "rev"])
@pytest.mark.parametrize("variant", THIRD)
def test_check_grads_to_third_order(variant, mode):
    case, options = THIRD[variant]
    check_grads(jax.jit(partial(linear_scan, **options)), given(case), order=3, modes=[mode])


@pytest.mark.parametrize("modes", ["fwd rev fwd", "rev rev rev", "rev fwd rev", "fwd fwd fwd"])
def test_H1_third_derivatives_equal_those_of_lax_scan(modes):
    """Every element of the tensor of third derivatives by factors and terms."""
    a, b = given(Case("", (3, 1)))
    jacobians = {"fwd": jax.jacfwd, "rev": jax.jacrev}

    def third(scan):
        def f(x):
            return jnp.sum(jnp.cos(scan(*x)))

        for mode in modes.split():
            f = jacobians[mode](f)
        return jax.jit(f)((a, b))

    actual, expected = (jax.tree.leaves(third(scan)) for scan in (linear_scan, lax_scan))
    assert len(actual) == 8
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_G6_complex_gradients_follow_jax(dtype):
    a, b, h0 = given(Case("", (2, 9, 3), h0=(2, 3)), dtype)
    tolerance = 1e-12 if dtype == "complex128" else 1e-4

    def gradient(f):
        return jax.jit(jax.grad(lambda *x: jnp.sum(jnp.abs(f(*x)) ** 3), (0, 1, 2)))(a, b, h0)

    for x, y in zip(gradient(linear_scan), gradient(lax_scan), strict=True):
        assert x.dtype == dtype
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def test_G6_complex_derivatives_to_second_order():
    x = given(Case("", (1, 3, 2)), "complex128")
    check_grads(jax.jit(linear_scan), x, order=2, modes=["fwd", "rev"])


def test_real_factors_with_complex_terms_have_real_gradients():
    a = given(Case("", (4, 3)))[0]
    b = given(Case("", (4, 3)), "complex128")[1]
    with jax.numpy_dtype_promotion("standard"):
        grads = jax.grad(lambda a, b: jnp.sum(jnp.abs(linear_scan(a, b)) ** 2), (0, 1))(a, b)
        expected = jax.grad(lambda a, b: jnp.sum(jnp.abs(lax_scan(a, b)) ** 2), (0, 1))(a, b)
        for x, y in zip(grads, expected, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=1e-12)
        check_grads(jax.jit(linear_scan), (a, b), order=2, modes=["fwd", "rev"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_G1_jacobians_agree_and_are_triangular(dtype):
    a, b = given(Case("", (1, 5, 1)), dtype)
    for argnum in (0, 1):
        reverse, forward = (
            np.squeeze(jac(linear_scan, argnum)(a, b)) for jac in (jax.jacrev, jax.jacfwd)
        )
        np.testing.assert_allclose(reverse, forward, rtol=1e-12 if dtype == "float64" else 1e-6)
        np.testing.assert_array_equal(np.triu(reverse, 1), 0)


def test_H1_jacfwd_equals_jacrev():
    a, b = given(Case("", (1, 4, 2)))
    for argnum in (0, 1):
        reverse, forward = (jac(linear_scan, argnum)(a, b) for jac in (jax.jacrev, jax.jacfwd))
        np.testing.assert_allclose(reverse, forward, rtol=1e-12)


def test_G3_gradient_through_h0_and_the_last_state_alone():
    case = Case("", (2, 9, 3), h0=(2, 3))
    a, b, h0 = given(case)
    grads = jax.grad(lambda h0: jnp.sum(linear_scan(a, b, h0)[:, -1]))(h0)
    np.testing.assert_allclose(grads, np.prod(a, 1), rtol=1e-12)
    producer = jax.grad(lambda w: jnp.sum(linear_scan(a, b, w * h0, return_state=True)[1]))
    np.testing.assert_allclose(producer(2.0), np.sum(np.prod(a, 1) * h0), rtol=1e-12)
    grads = jax.grad(lambda *x: jnp.sum(linear_scan(*x, return_state=True)[1]), (0, 1, 2))(a, b, h0)
    expected = jax.grad(lambda *x: jnp.sum(linear_scan(*x)[:, -1]), (0, 1, 2))(a, b, h0)
    for x, y in zip(grads, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)


def test_P2_gradient_of_shared_factors_has_their_shape():
    for shape in ((3,), (5, 3), (2, 5, 1), (1, 5, 1), ()):
        a, b = given(Case("", (2, 5, 3), a=shape))
        grad = jax.grad(lambda a, b=b: jnp.sum(jnp.sin(linear_scan(a, b))))(a)
        full = jax.grad(lambda a, b=b: jnp.sum(jnp.sin(linear_scan(a, b))))(
            jnp.broadcast_to(a, b.shape)
        )
        assert grad.shape == shape
        axes = tuple(range(3 - len(shape))) + tuple(
            k for k in range(-len(shape), 0) if shape[k] == 1
        )
        np.testing.assert_allclose(
            grad, np.sum(full, axes, keepdims=True).reshape(shape), rtol=1e-12
        )


def test_E1_gradients_of_empty_scans():
    for shape in ((2, 0, 3), (0, 5, 3), (2, 5, 0)):
        b = jnp.ones(shape)
        h0 = jnp.ones((shape[0], shape[2]))
        a = jnp.ones((shape[2],))

        def loss(a, b, h0):
            h, state = linear_scan(a, b, h0, return_state=True)
            return jnp.sum(h) + jnp.sum(state * state)

        ga, gb, gh0 = jax.jit(jax.grad(loss, (0, 1, 2)))(a, b, h0)
        assert (ga.shape, gb.shape, gh0.shape) == (a.shape, b.shape, h0.shape)
        np.testing.assert_array_equal(ga, 0)
        np.testing.assert_array_equal(gh0, 2 if shape[1] == 0 else 0)
        for gradient in jax.grad(lambda *x: jnp.sum(linear_scan(*x)), (0, 2))(a, b, h0):
            assert shape[1] or not gradient.any()
        assert not jax.grad(lambda *x: jnp.sum(linear_scan(*x)))(a, b).any()
        jax.jit(jax.hessian(loss))(a, b, h0)


# What each gradient may cost: (differentiated arguments) -> the scans of its program.
PRIMAL = ("scan", "a b h0", "h")
COST = {
    (0,): [PRIMAL, ("cotangent", "a h h0 g", "da")],
    (1,): [PRIMAL, ("cotangent", "a g", "db")],
    (2,): [PRIMAL, ("cotangent", "a g", "dh0")],
    (1, 2): [PRIMAL, ("cotangent", "a g", "db dh0")],
    (0, 1): [PRIMAL, ("cotangent", "a h h0 g", "da db")],
    (0, 1, 2): [PRIMAL, ("cotangent", "a h h0 g", "da db dh0")],
}


@pytest.mark.parametrize("argnums", COST)
def test_only_what_is_differentiated_is_computed(argnums):
    x = given()
    assert (
        scans(jax.grad(lambda *x: jnp.sum(jnp.sin(linear_scan(*x))), argnums), *x) == COST[argnums]
    )
    through_jit = jax.grad(lambda *x: jnp.sum(jnp.sin(jax.jit(linear_scan)(*x))), argnums)
    assert scans(through_jit, *x) == COST[argnums]


def test_cotangent_of_the_state_alone():
    a, b, h0 = given()
    grad = jax.grad(lambda b: jnp.sum(linear_scan(a, b, h0, return_state=True)[1]))
    assert scans(grad, b) == [("scan", "a b h0", "h state"), ("cotangent", "a gstate", "db")]
    both = jax.grad(lambda b: sum(map(jnp.sum, linear_scan(a, b, h0, return_state=True))))
    assert scans(both, b)[1] == ("cotangent", "a g gstate", "db")


def test_second_derivatives_are_scans_again():
    """A gradient is linear in its cotangent, and by the factors it is a few scans and products."""
    a, b, h0 = given()

    def vjp(a, g):
        return jax.vjp(lambda a: linear_scan(a, b, h0), a)[1](g)[0]

    g = jnp.ones_like(b)
    twice = jax.linear_transpose(partial(vjp, a), g)
    assert scans(twice, g) == [("tangent", "a h h0 da", "dh")]
    third = scans(jax.grad(lambda a: jnp.sum(vjp(a, g))), a)
    assert len(third) <= 5, third


def test_linear_transpose():
    a, b, h0 = given()
    g = normal(np.random.default_rng(0), b.shape, "float64")
    (direct,) = jax.linear_transpose(lambda b: linear_scan(a, b), b)(g)
    (pulled,) = jax.vjp(lambda b: linear_scan(a, b), b)[1](g)
    np.testing.assert_array_equal(direct, pulled)
    back = jax.linear_transpose(jax.linear_transpose(lambda b: linear_scan(a, b), b), g)
    np.testing.assert_allclose(back((b,))[0], linear_scan(a, b), rtol=1e-12)
    of_h0 = jax.linear_transpose(lambda h0: linear_scan(a, jnp.zeros_like(b), h0), h0)(g)[0]
    np.testing.assert_allclose(
        of_h0, jax.vjp(lambda h0: linear_scan(a, b, h0), h0)[1](g)[0], rtol=1e-12
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_first_factor_is_not_read_by_second_derivatives_either(reverse):
    a, b = given(Case("", (4, 2)))
    f = jax.jit(jax.hessian(lambda *x: jnp.sum(jnp.sin(linear_scan(*x, reverse=reverse))), (0, 1)))
    expected = f(a, b)
    for bad in (np.inf, np.nan):
        actual = f(a.at[-1 if reverse else 0].set(bad), b)
        for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            same(x, y)


def test_resets_stop_second_derivatives():
    a, b = given(Case("", (6, 2)))
    reset = np.arange(6) == 3
    f = jax.jit(jax.hessian(lambda *x: jnp.sum(jnp.sin(linear_scan(*x, reset=reset)[3:])), (0, 1)))
    expected = f(a, b)
    poisoned = f(a.at[3].set(np.nan), b)
    for x, y in zip(jax.tree.leaves(poisoned), jax.tree.leaves(expected), strict=True):
        same(x, y)
    assert not np.asarray(expected[0][1])[:4, :, :3].any()


def test_N3_sixteen_bit_gradients():
    """Within an ulp of bfloat16 of the exact one."""
    case = Case("", (2, 1024, 8))
    a, b, *_ = arguments(case, "bfloat16")
    grad = jax.grad(lambda *x: jnp.sum(linear_scan(*x, out_dtype=jnp.float64)), (0, 1))
    narrow = jax.grad(lambda *x: jnp.sum(linear_scan(*x, out_dtype=jnp.float32)), (0, 1))(a, b)
    wide = grad(*(x.astype(np.float64) for x in (a, b)))
    for x, y in zip(narrow, wide, strict=True):
        assert x.dtype == a.dtype
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=2.0**-7, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mapped", [False, True])
def test_N3_sums_of_sixteen_bit_cotangents_are_wide(dtype, mapped):
    """h0 and the factors lack the batch that h has, so the gradient is a sum of h's cotangents.

    That of float16 is beyond its largest number; h0 is in float32.
    """
    case = Case("", (64, 5, 3), a=(5, 3), h0=(3,))
    a, b, *_ = arguments(case, dtype)
    h0 = np.linspace(-1, 1, 3, dtype=np.float32)
    g = np.random.default_rng(1).uniform(1000, 3000, case.shape).astype(a.dtype)
    scan = jax.vmap(linear_scan, (None, 0, None)) if mapped else linear_scan
    (actual,) = jax.jit(lambda h0: jax.vjp(lambda h0: scan(a, b, h0), h0)[1](g))(h0)
    check(actual, Oracle(a, b, h0).cotangents(g)["h0"])


@pytest.mark.parametrize("reverse", [False, True])
def test_I1_second_order_of_a_length_beyond_32_bits(reverse):
    """Only traced: the derivatives of derivatives hold no 32-bit index of time."""
    x = jax.ShapeDtypeStruct((2**31 + 5,), jnp.float32)

    def loss(a, b):
        return jnp.sum(linear_scan(a, b, axis=0, reverse=reverse) ** 2)

    squared = jax.grad(lambda *args: jnp.sum(jax.grad(loss)(*args) ** 2))
    assert jax.eval_shape(squared, x, x).shape == x.shape
