"""Mapped axes: any subset of arguments, anywhere, nested, with nothing broadcast or transposed."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments
from jax import lax
from oracles import same
from programs import compiled, count, equations, lax_scan, scans

from jax_scan import linear_scan

N = 4
CASE = Case("", (2, 7, 3), h0=(2, 3))
NAMES = ("a", "b", "h0", "reset")


def batch(at=0, case=CASE):
    """N different problems; `at` is where each argument has its mapped axis."""
    rng = np.random.default_rng(0)
    many = [arguments(case, "float64", seed=k) for k in range(N)]
    arrays = [np.stack(x) for x in zip(*[(m.a, m.b, m.h0) for m in many], strict=True)]
    arrays.append(rng.uniform(size=(N, *case.shape[:2])) < 0.2)
    return [jnp.asarray(np.moveaxis(x, 0, at)) for x in arrays]


def run(a, b, h0, reset):
    return linear_scan(a, b, h0, reset=reset, return_state=True)


def everything(a, b, h0, reset):
    def f(a, b, h0):
        return run(a, b, h0, reset)

    out, pull = jax.vjp(f, a, b, h0)
    dots = jax.jvp(f, (a, b, h0), (b, a, h0))[1]
    return out, dots, pull(out)


SUBSETS = [s for n in (1, 2, 4) for s in itertools.combinations(NAMES, n)]


@pytest.mark.parametrize("at", [0, 1, -1])
@pytest.mark.parametrize("mapped", SUBSETS, ids=" ".join)
def test_T1_any_subset_anywhere(mapped, at):
    whole, first = batch(), [np.asarray(x)[0] for x in batch()]
    items = [
        everything(
            *(w[k] if n in mapped else f for n, w, f in zip(NAMES, whole, first, strict=True))
        )
        for k in (1, 3)
    ]
    axes = [at if n in mapped else None for n in NAMES]
    args = [w if n in mapped else f for n, w, f in zip(NAMES, batch(at), first, strict=True)]
    result = jax.jit(jax.vmap(everything, axes))(*args)
    for k, item in zip((1, 3), items, strict=True):
        for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(item), strict=True):
            np.testing.assert_allclose(x[k], y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (2, 2, None)]
)
def test_T1_nothing_is_broadcast_or_transposed(axes):
    """One scan of the arguments with axes of size 1, and no operation that moves data."""
    whole = batch(max(d or 0 for d in axes))
    args = [
        w if d is not None else first[0] for w, d, first in zip(whole, axes, batch(), strict=False)
    ]
    f = jax.vmap(linear_scan, axes, out_axes=next(d for d in axes if d is not None))
    assert scans(f, *args) == [("scan", "a b h0", "h")]
    sizes = {x.size for x in args}
    for equation in equations(f, *args):
        if not str(equation.primitive).startswith("linear_scan"):
            assert all(v.aval.size in sizes for v in equation.outvars), equation
    text = compiled(f, *args)
    for operation in ("broadcast", "transpose", "copy", "fusion"):
        assert count(text, operation) == 0, text


def test_T1_mapped_factors_of_lower_rank():
    """Factors (D,) and h0 (D,) per item: expanded by axes of size 1, moved nowhere."""
    a, b, h0, _ = batch()
    a, h0 = a[:, 0, 0], h0[:, 0]
    f = jax.vmap(linear_scan)
    for k in range(N):
        same(f(a, b, h0)[k], linear_scan(a[k], b[k], h0[k]))
    text = compiled(f, a, b, h0)
    for operation in ("broadcast", "transpose", "copy", "fusion"):
        assert count(text, operation) == 0, text


def test_T1_unmapped_factors_get_their_gradient_summed_once():
    a, b, *_ = batch()

    def f(a):
        return jnp.sum(jax.vmap(lambda b: jnp.sum(jnp.sin(linear_scan(a, b))))(b))

    expected = sum(
        jax.grad(lambda a, k=k: jnp.sum(jnp.sin(linear_scan(a, b[k]))))(a[0]) for k in range(N)
    )
    np.testing.assert_allclose(jax.grad(f)(a[0]), expected, rtol=1e-12)
    assert ("cotangent", "a h g", "da") in scans(jax.grad(f), a[0])


def test_T1_nested():
    a, b, h0, _ = batch()
    inner = jax.vmap(lambda a, b, h0: linear_scan(a, b, h0, axis=0), (1, None, 0), out_axes=1)
    outer = jax.vmap(inner, (None, 0, 0))
    result = jax.jit(outer)(a[0, 0], b[:, 0, :, 0], h0[:, 0])
    assert result.shape == (N, 7, 3)
    for k in range(N):
        expected = linear_scan(a[0, 0], jnp.broadcast_to(b[k, 0, :, :1], (7, 3)), h0[k, 0])
        same(result[k], expected)


def test_T1_ranks_equal_each_other():
    """Rank 2, mapped once and twice, is rank 3 and 4."""
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0.5, 1, (2, 2, 3, 6, 5))
    expected = linear_scan(a, b)
    same(jax.vmap(linear_scan)(a, b), expected)
    same(jax.vmap(jax.vmap(linear_scan))(a, b), expected)
    twice = jax.vmap(jax.vmap(linear_scan, (1, 1), 1), (3, 3), 3)
    same(twice(a, b), linear_scan(a, b, axis=0))


def test_T1_arguments_mapped_at_different_places():
    a, b, h0, _ = batch()
    f = jax.vmap(linear_scan, (2, 0, 1))
    same(f(jnp.moveaxis(a, 0, 2), b, jnp.moveaxis(h0, 0, 1)), jax.vmap(linear_scan)(a, b, h0))


def test_vmap_of_grad_and_grad_of_vmap():
    a, b, *_ = batch()

    def loss(a, b):
        return jnp.sum(jnp.cos(linear_scan(a, b)))

    one = jax.vmap(jax.grad(loss))(a, b)
    two = jax.grad(lambda a: jnp.sum(jax.vmap(loss)(a, b)))(a)
    np.testing.assert_allclose(one, two, rtol=1e-12)


def test_second_derivatives_of_mapped_scans():
    """Only the factors are mapped: cotangents with axes of size 1 are transposed too."""
    a, b, *_ = batch()
    a, b = a[:, 0, :3, :2], b[0, 0, :3, :2]

    def mapped(g):
        return jnp.sum(jax.vmap(lambda a: jax.vjp(lambda b: linear_scan(a, b), b)[1](g)[0] ** 2)(a))

    def looped(g):
        return sum(
            jnp.sum(jax.vjp(lambda b, k=k: linear_scan(a[k], b), b)[1](g)[0] ** 2) for k in range(N)
        )

    g = jnp.ones_like(b)
    np.testing.assert_allclose(jax.grad(mapped)(g), jax.grad(looped)(g), rtol=1e-12)
    one, two = (jax.jit(jax.hessian(f))(g) for f in (mapped, looped))
    np.testing.assert_allclose(one, two, rtol=1e-12)


def test_mapped_empty_scans():
    b = jnp.ones((N, 0, 3))
    h, state = jax.vmap(lambda b: linear_scan(0.5, b, 2.0, return_state=True))(b)
    assert h.shape == b.shape
    same(state, np.full((N, 3), 2.0))


def test_collectives_over_a_mapped_axis():
    """`axis_name`, with `psum` before and after; the gradient passes through both."""
    a, b, h0, _ = batch()

    def loss(scan):
        def item(a, b, h0):
            h = scan(a, b - lax.pmean(b, "i"), h0)
            return lax.psum(jnp.sum(jnp.sin(h)), "i")

        return lambda *x: jax.vmap(item, axis_name="i")(*x)[0]

    actual, expected = (jax.grad(loss(f), (0, 1, 2))(a, b, h0) for f in (linear_scan, lax_scan))
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13)


def test_custom_batching_around_a_scan():
    """A rule for a shared state matrix, and one that runs items one by one."""
    a, b, *_ = batch()

    @jax.custom_batching.custom_vmap
    def f(a, b):
        return linear_scan(a, b)

    @f.def_vmap
    def _(size, mapped, a, b):
        assert mapped == [False, True]
        return linear_scan(a, b), True

    np.testing.assert_allclose(
        jax.vmap(f, (None, 0))(a[0], b), jax.vmap(lax_scan, (None, 0))(a[0], b), rtol=1e-12
    )
    one_by_one = jax.custom_batching.sequential_vmap(linear_scan)
    np.testing.assert_allclose(
        jax.jit(jax.vmap(one_by_one))(a, b), jax.vmap(lax_scan)(a, b), rtol=1e-12
    )
    assert scans(jax.vmap(one_by_one), a, b) == [("scan", "a b", "h")]


def test_derivatives_of_three_mapped_axes():
    """Each argument mapped by another level, to second order."""
    a, b, h0, _ = batch()
    a, b, h0 = a[:, 0, :3, :2], b[:, 0, :3, :2], h0[:, 0, :2]

    def f(scan):
        def loss(a, b, h0):
            return jnp.sum(jnp.sin(scan(a, b, h0)))

        grad = jax.grad(loss, (0, 1, 2))

        def product(*x):
            return jax.jvp(grad, x, x)[1]

        for axes in ((0, None, None), (None, 0, None), (None, None, 0)):
            product = jax.vmap(product, axes, axes[0] or 0)
        return jax.jit(product)(a, b, h0)

    for x, y in zip(f(linear_scan), f(lax_scan), strict=True):
        assert x.shape[:3] == (N, N, N)
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 40, 32), (3, 300, 64)])
def test_mapped_tangents_of_sixteen_bit_data(shape, dtype):
    """A tangent that is mapped where h is not reads h with a stride of zero in between."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.uniform(-0.9, 0.9, shape), dtype) for _ in range(2))
    da, db = (jnp.asarray(rng.normal(size=(*shape, 5)), dtype) for _ in range(2))

    def dots(scan, a, b, da, db):
        return jax.vmap(lambda da, db: jax.jvp(scan, (a, b), (da, db))[1], -1, -1)(da, db)

    result = jax.jit(lambda *args: dots(linear_scan, *args))(a, b, da, db)
    assert result.dtype == dtype
    want = dots(lax_scan, *(x.astype("float64") for x in (a, b, da, db)))
    rounding = float(jnp.finfo(dtype).eps)
    # h has been rounded, and the result is.
    bound = rounding * (np.abs(want) + 20 * np.abs(want).mean())
    assert (np.abs(np.asarray(result, "float64") - want) <= bound).all()
