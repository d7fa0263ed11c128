"""Compositions with the rest of JAX."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import Case, arguments
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracles import Oracle, check, same
from programs import lax_scan, scans

from jax_scan import linear_scan

CASE = Case("", (2, 64, 3), h0=(2, 3))


def given(case=CASE, dtype="float64"):
    a, b, h0, _ = arguments(case, dtype)
    return tuple(jnp.asarray(x) for x in (a, b, h0) if x is not None)


def loss(*x):
    return jnp.sum(jnp.sin(linear_scan(*x)))


GRAD = jax.grad(loss, (0, 1, 2))


def all_same(actual, expected):
    jax.tree.map(same, actual, expected)


def test_G7_chained_scans_in_one_jit():
    a, b, _ = given(Case("", (2, 7, 3), h0=(2, 3)))
    a2 = a[::-1]

    def chain(scan, a, a2, b):
        return jnp.sum(jnp.cos(scan(a2, jnp.tanh(scan(a, b)))))

    ours = jax.grad(partial(chain, linear_scan), (0, 1, 2))
    reference = jax.jit(jax.grad(partial(chain, lax_scan), (0, 1, 2)))(a, a2, b)
    all_same(jax.jit(ours)(a, a2, b), reference)
    all_same(ours(a, a2, b), reference)


def test_jit_of_grad_of_jit():
    x = given()
    all_same(jax.jit(jax.grad(jax.jit(loss), (0, 1, 2)))(*x), GRAD(*x))


@pytest.mark.parametrize("check_vma", [True, False])
def test_S2_shard_map_on_one_device(check_vma):
    """Operands that vary over a mesh axis and operands that do not meet in one call."""
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,), devices=jax.devices()[:1])
    a, b, h0 = given()
    a = a[0]

    def local(a, b, h0):
        h, state = linear_scan(a, b, h0, return_state=True)
        return h + linear_scan(a, b), state

    specs = {"in_specs": (P(), P("x"), P("x")), "out_specs": (P("x"), P("x"))}
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs))
    all_same(mapped(a, b, h0), local(a, b, h0))

    def total(f):
        return lambda *x: sum(jnp.sum(jnp.sin(y)) for y in f(*x))

    def twice(f):
        return jax.grad(lambda a: jnp.sum(jax.grad(total(f))(a, b, h0) ** 2))

    grads = jax.jit(jax.grad(total(mapped), (0, 1, 2)))(a, b, h0)
    all_same(grads, jax.grad(total(local), (0, 1, 2))(a, b, h0))
    all_same(jax.jit(twice(mapped))(a), jax.jit(twice(local))(a))


def test_scans_in_a_jitted_function_are_those_of_the_function():
    x = given()
    assert scans(jax.jit(linear_scan), *x) == scans(linear_scan, *x) == [("scan", "a b h0", "h")]


def test_long_scan_in_a_jit_with_neighbours():
    case = Case("", (2, 3000, 5), h0=(2, 5))
    a, b, h0, _ = arguments(case)
    h = jax.jit(lambda a, b, h0: linear_scan(a * 1, b + 0, h0 * 1))(a, b, h0)
    check(h, Oracle(a, b, h0).values()[0])


def test_values_while_tracing():
    """`eval_shape`, evaluation at compile time, and closed-over constants."""
    a, b, h0 = given()
    shape = jax.eval_shape(GRAD, a, b, h0)
    assert [x.shape for x in shape] == [a.shape, b.shape, h0.shape]

    @jax.jit
    def f(scale):
        with jax.ensure_compile_time_eval():
            h = linear_scan(a, b, h0)
            assert not isinstance(h, jax.core.Tracer)
        return h * scale + linear_scan(a, b, h0)

    same(f(2.0), 3 * lax_scan(a, b, h0))
