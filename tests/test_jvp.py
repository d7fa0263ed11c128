"""Forward mode, and its agreement with reverse mode."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments, normal
from programs import lax_scan, scans

from jax_scan import linear_scan

CASE = Case("", (2, 9, 3), h0=(2, 3))


def given(dtype="float64") -> dict[str, Any]:
    a, b, h0, _ = arguments(CASE, dtype)
    return {"a": jnp.asarray(a), "b": jnp.asarray(b), "h0": jnp.asarray(h0)}


# Tangents that are there -> operands of the tangent's scan.
COST = {
    ("a",): "a h h0 da",
    ("b",): "a db",
    ("h0",): "a dh0",
    ("a", "b"): "a h h0 da db",
    ("b", "h0"): "a db dh0",
    ("a", "b", "h0"): "a h h0 da db dh0",
}


@pytest.mark.parametrize("names", COST)
def test_only_tangents_that_are_there_take_part(names):
    x = given()

    def f(moving):
        return linear_scan(**{**x, **moving})

    moving = {name: x[name] for name in names}
    expected = [("scan", "a b h0", "h"), ("tangent", COST[names], "dh")]
    assert scans(lambda d: jax.jvp(f, (moving,), (d,)), moving) == expected


def test_tangent_spans_only_its_own_axes():
    """Where factors and dh0 are shared, the tangent is computed once and broadcast afterwards."""
    a, b = jnp.full((1, 9, 1), 0.5), given()["b"]
    h0 = jnp.ones((1, 1))
    program = jax.make_jaxpr(lambda d: jax.jvp(lambda h0: linear_scan(a, b, h0), (h0,), (d,))[1])(
        h0
    )
    (equation,) = (e for e in program.eqns if str(e.primitive) == "linear_scan_tangent")
    assert equation.outvars[0].aval.shape == (1, 9, 1)
    assert program.out_avals[0].shape == b.shape
    dot = jax.jvp(lambda h0: linear_scan(a, b, h0), (h0,), (h0,))[1]
    np.testing.assert_allclose(
        dot, np.broadcast_to(0.5 ** np.arange(1.0, 10)[None, :, None], b.shape)
    )
    grad = jax.grad(lambda h0: jnp.sum(linear_scan(a, b, h0)))(h0)
    np.testing.assert_allclose(grad, [[6 * (1 - 0.5**9)]])


def test_resets_have_no_tangent():
    x = given()
    reset = jnp.arange(9) == 4

    def f(b, reset):
        return linear_scan(x["a"], b, reset=reset)

    none = np.zeros(reset.shape, jax.dtypes.float0)
    out, dot = jax.jvp(f, (x["b"], reset), (x["b"], none))
    np.testing.assert_array_equal(out, dot)
    out, dot = jax.jvp(lambda reset: f(x["b"], reset), (reset,), (none,))
    assert not dot.any()
    pulled = jax.vjp(f, x["b"], reset)[1](out)
    assert pulled[1].dtype == jax.dtypes.float0


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_H1_dot_products_of_both_modes(dtype):
    """<g, J x> = <J^T g, x>, for all arguments and results, both directions, with resets."""
    rng = np.random.default_rng(0)
    for reverse, reset in itertools.product([False, True], [None, np.arange(9) == 4]):
        f = partial(linear_scan, reverse=reverse, reset=reset, return_state=True)
        primals = tuple(given(dtype).values())
        dots = tuple(normal(rng, x.shape, dtype) for x in primals)
        out, forward = jax.jvp(f, primals, dots)
        cts = tuple(normal(rng, x.shape, dtype) for x in out)
        pulled = jax.vjp(f, *primals)[1](cts)
        left = sum(np.sum(x * y) for x, y in zip(cts, forward, strict=True))
        right = sum(np.sum(x * y) for x, y in zip(pulled, dots, strict=True))
        np.testing.assert_allclose(left, right, rtol=1e-12)


def test_H1_hessian_equals_that_of_lax_scan():
    x = given()
    a, b, h0 = x["a"][0, :4, :1], x["b"][0, :4, :1], x["h0"][0, :1]

    def loss(f):
        return lambda *x: jnp.sum(jnp.cos(f(*x)))

    actual = jax.jit(jax.hessian(loss(linear_scan), (0, 1, 2)))(a, b, h0)
    expected = jax.jit(jax.hessian(loss(lax_scan), (0, 1, 2)))(a, b, h0)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


def test_H1_every_order_of_modes_gives_the_same_hessian():
    x = given()
    a, b = x["a"][0, :4, :2], x["b"][0, :4, :2]

    def f(a):
        return jnp.sum(jnp.cos(linear_scan(a, b)))

    modes = (jax.jacfwd, jax.jacrev)
    first, *others = [jax.jit(m(n(f)))(a) for m, n in itertools.product(modes, modes)]
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-12, atol=1e-13)


def test_linearize():
    x = given()
    out, linear = jax.linearize(lambda x: linear_scan(**x), x)
    np.testing.assert_array_equal(out, linear_scan(**x))
    np.testing.assert_allclose(
        linear(x), jax.jvp(lambda x: linear_scan(**x), (x,), (x,))[1], rtol=1e-12
    )
