"""Scans inside functions with rules of their own, and arguments without tangents."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments
from jax.custom_derivatives import SymbolicZero
from oracles import same
from programs import lax_scan, scans

from jax_scan import linear_scan


def given():
    a, b, h0, _ = arguments(Case("", (2, 6, 3), h0=(2, 3)), "float64")
    return tuple(jnp.asarray(x) for x in (a, b, h0))


def all_same(actual, expected):
    jax.tree.map(same, actual, expected)


def everything(f, *x):
    """Value, tangent, gradient, and both modes over the gradient; mapped too."""

    def loss(*x):
        return jnp.sum(jnp.sin(f(*x)))

    every = tuple(range(len(x)))
    grad = jax.grad(loss, every)

    def product(*x):
        return sum(jnp.sum(g * y) for g, y in zip(grad(*x), x, strict=True))

    out = {
        "value": f(*x),
        "tangent": jax.jvp(f, x, x)[1],
        "gradient": grad(*x),
        "forward over reverse": jax.jvp(grad, x, x)[1],
        "reverse over reverse": jax.grad(product, every)(*x),
    }
    mapped = jax.vmap(grad)(*(jnp.stack([y, y * 0.5]) for y in x))
    return out | {"mapped": mapped}


def test_H1_custom_jvp_whose_tangent_calls_the_scan():
    """The tangent rule written out in scans; everything else JAX derives from it."""

    @jax.custom_jvp
    def f(a, b, h0):
        return linear_scan(a, b, h0)

    @f.defjvp
    def _(primals, tangents):
        (a, b, h0), (da, db, dh0) = primals, tangents
        h = f(a, b, h0)
        previous = jnp.concatenate([h0[:, None], h[:, :-1]], 1)
        return h, linear_scan(a, da * previous + db, dh0)

    x = given()
    all_same(jax.jit(partial(everything, f))(*x), jax.jit(partial(everything, lax_scan))(*x))


def test_custom_jvp_with_symbolic_zeros():
    @jax.custom_jvp
    def f(a, b):
        return linear_scan(a, b)

    seen = []

    @partial(f.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        a, b = primals
        da, db = tangents
        seen.append((type(da) is SymbolicZero, type(db) is SymbolicZero))
        if type(da) is SymbolicZero:
            return f(a, b), linear_scan(a, db)
        return jax.jvp(linear_scan, primals, (da, jnp.zeros_like(b)))

    a, b, _ = given()
    for k in (0, 1):
        actual = jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), k)(a, b)
        same(actual, jax.grad(lambda *x: jnp.sum(jnp.sin(lax_scan(*x))), k)(a, b))
    assert seen == [(False, True), (True, False)]


def test_custom_vjp_around_a_scan():
    """A rule that keeps nothing but its arguments; reverse mode of it to second order, mapped."""

    @jax.custom_vjp
    def f(a, b, h0):
        return linear_scan(a, b, h0)

    f.defvjp(
        lambda *x: (linear_scan(*x), x),
        lambda x, g: jax.vjp(linear_scan, *x)[1](g),
    )

    def reverse_only(f, *x):
        def loss(*x):
            return jnp.sum(jnp.sin(f(*x)))

        grad = jax.grad(loss, (0, 1, 2))
        twice = jax.grad(lambda *x: sum(jnp.sum(g**2) for g in grad(*x)), (0, 1, 2))
        return f(*x), grad(*x), twice(*x), jax.vmap(grad)(*(y[None] for y in x))

    x = given()
    all_same(jax.jit(partial(reverse_only, f))(*x), jax.jit(partial(reverse_only, lax_scan))(*x))


def test_custom_vjp_with_symbolic_zeros():
    """Cotangents of an unused result, and arguments that are not differentiated."""

    @jax.custom_vjp
    def f(a, b, h0):
        return linear_scan(a, b, h0, return_state=True)

    seen = {}

    def forward(a, b, h0):
        seen["perturbed"] = (a.perturbed, b.perturbed, h0.perturbed)
        x = a.value, b.value, h0.value
        return linear_scan(*x, return_state=True), x

    def backward(x, cotangents):
        g, gstate = cotangents
        seen["zero"] = type(g) is SymbolicZero, type(gstate) is SymbolicZero
        return jax.vjp(linear_scan, *x)[1](g)

    f.defvjp(forward, backward, symbolic_zeros=True)
    a, b, h0 = given()
    actual = jax.grad(lambda b: jnp.sum(jnp.sin(f(a, b, h0)[0])))(b)
    same(actual, jax.grad(lambda b: jnp.sum(jnp.sin(lax_scan(a, b, h0))))(b))
    assert seen == {"perturbed": (False, True, False), "zero": (False, True)}


def test_scan_of_a_custom_function():
    """Cotangents and tangents that come from others' rules."""

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    a, b, h0 = given()
    actual = jax.grad(lambda b: jnp.sum(linear_scan(a, clipped(b), h0)))(b)
    plain = jax.grad(lambda b: jnp.sum(lax_scan(a, b, h0)))(b)
    same(actual, np.clip(plain, -0.1, 0.1))
    stopped = jax.grad(lambda b: jnp.sum(jax.lax.stop_gradient(linear_scan(a, b, h0)) * b))(b)
    same(stopped, lax_scan(a, b, h0))


def test_float0():
    """Booleans and integers have tangents and cotangents of dtype float0, which are ignored."""
    a, b, h0 = given()
    reset = jnp.arange(6) == 4
    none = np.zeros(reset.shape, jax.dtypes.float0)

    def f(b, reset, k, scan=linear_scan):
        return scan(a, b, h0 * k.astype(b.dtype), reset=reset)

    k = jnp.asarray(2)
    zero = np.zeros((), jax.dtypes.float0)
    out, dot = jax.jvp(f, (b, reset, k), (b, none, zero))
    same(dot, jax.jvp(lambda b: f(b, reset, k, lax_scan), (b,), (b,))[1])
    pulled = jax.vjp(f, b, reset, k)[1](out)
    assert [x.dtype for x in pulled] == [b.dtype, jax.dtypes.float0, jax.dtypes.float0]
    linear = jax.linearize(f, b, reset, k)[1]
    same(linear(b, none, zero), dot)
    mapped = jax.vmap(lambda r: jax.vjp(f, b, r, k)[1](out)[0])(jnp.stack([reset, ~reset]))
    for k_, r in enumerate((reset, ~reset)):
        same(mapped[k_], jax.vjp(lambda b, r=r: f(b, r, k, lax_scan), b)[1](out)[0])
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        jax.grad(lambda r: jnp.sum(f(b, r, k)))(reset)


def test_symbolic_zeros_stay_symbolic():
    """Zeros pass through jit, vmap, loops and checkpoint without becoming arrays."""
    a, b, h0 = given()
    transforms = {
        "jit": lambda f: jax.jit(f),
        "checkpoint": lambda f: jax.checkpoint(f),
        "vmap": lambda f: lambda b: jax.vmap(f)(b[None])[0],
        "loop": lambda f: lambda b: jax.lax.scan(lambda x, _: (f(x), None), b, length=2)[0],
    }
    for name, transform in transforms.items():
        f = transform(lambda b: linear_scan(a, b, h0))
        found = {s for s in scans(lambda b, f=f: jax.jvp(f, (b,), (b,)), b) if s[0] != "scan"}
        assert found == {("tangent", "a db", "dh")}, name
        found = {s for s in scans(jax.grad(lambda b, f=f: jnp.sum(f(b) ** 2)), b) if s[0] != "scan"}
        assert found == {("cotangent", "a g", "db")}, name
