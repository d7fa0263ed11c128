"""Scans inside loops, branches and maps over devices."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments
from jax import lax
from oracles import same
from programs import lax_scan, scans

from jax_scan import linear_scan


def given():
    a, b, h0, _ = arguments(Case("", (2, 6, 3), h0=(2, 3)), "float64")
    return tuple(jnp.asarray(x) for x in (a, b, h0))


def all_same(actual, expected):
    jax.tree.map(same, actual, expected)


def repeated(a, b, h0, n, scan=lax_scan):
    """n scans, each over the last one's output and from its last state: what is expected of all."""
    for _ in range(n):
        b, h0 = scan(a, jnp.sin(b), h0, return_state=True)
    return b, h0


def by_scan(a, b, h0, n):
    def step(carry, _):
        return linear_scan(a, jnp.sin(carry[0]), carry[1], return_state=True), None

    return lax.scan(step, (b, h0), length=n)[0]


def by_fori(a, b, h0, n):
    """With fixed bounds, which makes it differentiable in both modes."""
    return lax.fori_loop(
        0, n, lambda _, x: linear_scan(a, jnp.sin(x[0]), x[1], return_state=True), (b, h0)
    )


def by_while(a, b, h0, n):
    def step(carry):
        k, b, h0 = carry
        return k + 1, *linear_scan(a, jnp.sin(b), h0, return_state=True)

    return lax.while_loop(lambda carry: carry[0] < n, step, (0, b, h0))[1:]


def by_cond(a, b, h0, n):
    """Every second branch is taken."""
    for k in range(2 * n):
        b, h0 = lax.cond(
            jnp.arange(2 * n)[k] % 2 == 0,
            lambda b, h0: linear_scan(a, jnp.sin(b), h0, return_state=True),
            lambda b, h0: (b, h0),
            b,
            h0,
        )
    return b, h0


def by_switch(a, b, h0, n):
    branches = [lambda *x, k=k: repeated(a, *x, k, linear_scan) for k in range(n + 1)]
    return lax.switch(jnp.asarray(n), branches, b, h0)


LOOPS = {"scan": by_scan, "fori_loop": by_fori, "cond": by_cond, "switch": by_switch}


@pytest.mark.parametrize("loop", [*LOOPS.values(), by_while], ids=[*LOOPS, "while_loop"])
def test_values_and_tangents(loop):
    x = given()
    f = jax.jit(lambda *x: loop(*x, 3))
    all_same(f(*x), repeated(*x, 3))
    all_same(jax.jvp(f, x, x)[1], jax.jvp(lambda *x: repeated(*x, 3), x, x)[1])


def summed(f):
    return lambda *x: sum(jnp.sum(y**2) for y in f(*x, 3))


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_gradients_to_second_order(loop):
    x = given()

    def both(f):
        def product(*x):
            return sum(jnp.sum(g * y) for g, y in zip(jax.grad(f, (0, 1, 2))(*x), x, strict=True))

        return jax.jit(lambda *x: (jax.grad(f, (0, 1, 2))(*x), jax.grad(product, (0, 1, 2))(*x)))

    actual, expected = both(summed(loop))(*x), both(summed(repeated))(*x)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11)


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (None, None, 0), (0, 0, 0)])
@pytest.mark.parametrize("loop", [*LOOPS.values(), by_while], ids=[*LOOPS, "while_loop"])
def test_T1_mapped_loops(loop, axes):
    """What is not mapped at first becomes so as the loop carries it round."""
    x = given()
    n = 3
    args = [
        jnp.stack([y * (1 + k / 10) for k in range(n)]) if d == 0 else y
        for y, d in zip(x, axes, strict=True)
    ]
    result = jax.jit(jax.vmap(lambda *x: loop(*x, 2), axes))(*args)
    for k in range(n):
        item = [y if d is None else y[k] for y, d in zip(args, axes, strict=True)]
        all_same(jax.tree.map(lambda y, k=k: y[k], result), repeated(*item, 2))


def test_mapped_predicates():
    """A mapped `cond` runs both branches, a mapped `while_loop` until the last item is done."""
    a, b, h0 = given()
    on = jnp.array([True, False, True])
    f = jax.vmap(lambda on, b: lax.cond(on, lambda: linear_scan(a, b, h0), lambda: b), (0, None))
    result = jax.jit(f)(on, b)
    same(result[0], lax_scan(a, b, h0))
    same(result[1], b)
    same(result[2], result[0])
    grads = jax.vmap(jax.grad(lambda b, on: jnp.sum(f(on[None], b) ** 2)), (None, 0))(b, on)
    same(grads[1], 2 * b)
    same(grads[0], jax.grad(lambda b: jnp.sum(lax_scan(a, b, h0) ** 2))(b))

    counts = jnp.array([0, 1, 3])
    many = jax.jit(jax.vmap(lambda n: by_while(a, b, h0, n)))(counts)
    for k, n in enumerate(counts.tolist()):
        all_same(jax.tree.map(lambda y, k=k: y[k], many), repeated(a, b, h0, n))


def test_lax_map_in_batches():
    a, b, h0 = given()
    stack = jnp.stack([b * k for k in range(5)])
    result = lax.map(lambda b: linear_scan(a, b, h0), stack, batch_size=2)
    for k in range(5):
        same(result[k], lax_scan(a, stack[k], h0))


def test_loops_hold_one_scan_each():
    """Nothing is unrolled or run twice in a loop's gradient."""
    x = given()
    found = scans(jax.grad(summed(by_scan), (0, 1, 2)), *x)
    assert [name for name, *_ in found] == ["scan", "cotangent"]


def test_pmap():
    a, b, h0 = (jnp.stack([x] * jax.local_device_count()) for x in given())

    def f(scan, a, b, h0):
        def loss(*x):
            return jnp.sum(jnp.sin(scan(*x)))

        return scan(a, b, h0, return_state=True), jax.grad(loss, (0, 1, 2))(a, b, h0)

    ours, reference = partial(f, linear_scan), partial(f, lax_scan)
    all_same(jax.pmap(ours)(a, b, h0), jax.vmap(reference)(a, b, h0))
    shared = jax.pmap(ours, in_axes=(None, 0, None))(a[0], b, h0[0])
    all_same(shared, jax.vmap(reference, (None, 0, None))(a[0], b, h0[0]))


def test_S3_pmap_over_two_devices(python):
    out = python(
        """
        import jax, jax.numpy as jnp, numpy as np
        from jax_scan import linear_scan
        a, b = (jax.random.uniform(jax.random.key(k), (2, 4, 9, 3)) for k in range(2))
        def f(a, b):
            total = lambda a, b: jax.lax.psum(jnp.sum(jnp.sin(linear_scan(a, b))), "i")
            return linear_scan(a, b), jax.grad(total, (0, 1))(a, b)
        one, many = (m(f, axis_name="i")(a, b) for m in (jax.vmap, jax.pmap))
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        mixed = jax.pmap(jax.vmap(linear_scan, (None, 0)), in_axes=(None, 0))(a[0, 0], b)
        np.testing.assert_allclose(mixed, linear_scan(a[0, 0], b), rtol=1e-5, atol=1e-6)
        print(jax.device_count(), len(many[0].sharding.device_set))
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert out.split() == ["2", "2"]
