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


DOTS = {
    "plain": Case("", (2, 9, 3), h0=(2, 3)),
    "reversed": Case("", (2, 9, 3), h0=(2, 3), reverse=True),
    "reset": Case("", (2, 9, 3), h0=(2, 3), reset=(9,)),
    "reset, reversed, no h0": Case("", (2, 9, 3), reset=(2, 9), reverse=True),
    "shared a": Case("", (2, 9, 3), a=(3,), h0=(1, 3)),
    "time last": Case("", (2, 3, 9), axis=-1, a=(3, 1), h0=(2, 3)),
    "time first": Case("", (9, 2), axis=0, a=(9, 1), h0=()),
}


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("case", DOTS.values(), ids=DOTS)
def test_H1_dot_products_of_both_modes(case, dtype):
    """<g, J x> = <J^T g, x>, of the scan and of its gradient as a function of all its arguments."""
    rng = np.random.default_rng(0)
    *primals, reset = arguments(case, dtype)
    primals = tuple(jnp.asarray(x) for x in primals if x is not None)
    f = partial(linear_scan, axis=case.axis, reverse=case.reverse, reset=reset, return_state=True)

    def gradient(cts, *x):
        return jax.vjp(f, *x)[1](cts)

    def random(tree):
        return jax.tree.map(lambda x: normal(rng, x.shape, dtype), tree)

    def dot(x, y):
        pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
        return sum(np.sum(x * y) for x, y in pairs)

    cts = random(f(*primals))
    for g, x in ((f, primals), (gradient, (cts, *primals))):
        dots = random(x)
        out, forward = jax.jit(lambda x, d, g=g: jax.jvp(g, x, d))(x, dots)
        weights = random(out)
        pulled = jax.jit(lambda x, w, g=g: jax.vjp(g, *x)[1](w))(x, weights)
        np.testing.assert_allclose(dot(weights, forward), dot(pulled, dots), rtol=1e-11)


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


@pytest.mark.parametrize("jitted", [False, True])
def test_linearize(jitted):
    """Linearised once, applied to many tangents, mapped and transposed; nothing is run again."""
    x = tuple(given().values())
    f = jax.jit(linear_scan) if jitted else linear_scan
    out, linear = jax.linearize(f, *x)
    np.testing.assert_allclose(out, lax_scan(*x), rtol=1e-12)
    expected = jax.jvp(lax_scan, x, x)[1]
    np.testing.assert_allclose(linear(*x), expected, rtol=1e-11, atol=1e-12)
    mapped = jax.vmap(linear)(*(jnp.stack([y, -2 * y]) for y in x))
    np.testing.assert_allclose(mapped[1], -2 * expected, rtol=1e-11, atol=1e-12)
    transposed = jax.linear_transpose(linear, *x)(out)
    for one, other in zip(transposed, jax.vjp(lax_scan, *x)[1](out), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)
    assert scans(linear, *x) == [("tangent", "a h h0 da db dh0", "dh")]
