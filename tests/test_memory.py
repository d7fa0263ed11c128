"""What a scan and its gradient keep, move and compute: nothing that nobody asked for."""

from __future__ import annotations

import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments
from oracles import same
from programs import calls, compiled, movers

from jax_scan import _primitives, linear_scan

FULL = Case("", (8, 256, 64), h0=(8, 64))
SHARED = Case("", (8, 256, 64), a=(64,), h0=(64,))
VARIANTS = {
    "plain": (FULL, {}),
    "reversed, with state": (FULL, {"reverse": True, "return_state": True}),
    "reset": (FULL, {"reset": np.arange(256) % 100 == 7}),
    "time first": (Case("", (256, 8, 64), axis=0, h0=(8, 64)), {"axis": 0}),
    "time last": (Case("", (8, 64, 256), axis=-1, h0=(8, 64)), {"axis": -1}),
    "shared a": (SHARED, {}),
    "a shared over channels": (Case("", (8, 256, 64), a=(8, 256, 1), h0=()), {}),
}


def given(case: Case, dtype: str = "float32"):
    a, b, h0, _ = arguments(case, dtype)
    return jnp.asarray(a), jnp.asarray(b), jnp.asarray(h0)


def pullback(f, cotangents, *x):
    return jax.vjp(f, *x)[1](cotangents)


def forward(f, *x):
    return jax.jvp(f, x, x)


# ---- Moving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_P2_nothing_moves_an_operand(variant):
    """Besides the custom calls no instruction makes an array of b's size."""
    case, options = VARIANTS[variant]
    x = given(case)
    f = partial(linear_scan, **options)
    size = x[1].size
    for g, args, kernels in (
        (f, x, ["scan"]),
        (partial(forward, f), x, ["scan", "tangent"]),
        (partial(pullback, f), (f(*x), *x), ["scan", "cotangent"]),
    ):
        program = compiled(g, *args)
        found = [k for k in kernels if f'custom_call_target="jax_scan.v1.{k}' in program]
        assert found == kernels
        assert movers(program, size) == [], program


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("mapped", ["a b h0", "b h0", "b", "a", "h0"])
def test_P2_nothing_moves_an_operand_of_a_mapped_scan(mapped, at):
    """Wherever the mapped axis is; what is not mapped is never copied per item."""
    n, names = 5, mapped.split()
    axes, args = [], []
    for name, x in zip(("a", "b", "h0"), given(Case("", (4, 64, 8), h0=(4, 8))), strict=True):
        # h0 has no time axis: one place less, and the mapped axis is the same one.
        where = at - (name == "h0" and at > 1)
        axes.append(where if name in names else None)
        args.append(jnp.stack([x] * n, where) if name in names else x)
    # If h0 alone is mapped, it moves (it alone) so that items come first.
    f = jax.vmap(linear_scan, axes, 0 if names == ["h0"] else at)
    program = compiled(f, *args)
    assert movers(program, 4 * 64 * 8) == [], program
    backward = compiled(lambda ct, *x: jax.vjp(f, *x)[1](ct), f(*args), *args)
    # What is not mapped has a gradient that is summed over the items, and not copied either.
    assert movers(backward, 4 * 64 * 8 * n) == [], backward


def test_P2_gradient_of_shared_factors_is_summed_in_the_kernel():
    """da of (D,) factors leaves the kernel without time; no array of b's size is made for it."""
    x = given(SHARED)
    program = compiled(partial(pullback, linear_scan), x[1], *x)
    assert "f32[8,1,64]" in program
    assert movers(program, x[1].size) == []
    da, db, dh0 = jax.jit(partial(pullback, linear_scan))(x[1], *x)
    assert (da.shape, db.shape, dh0.shape) == ((64,), x[1].shape, (64,))


# ---- Keeping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("variant", ["plain", "reversed, with state", "time last", "shared a"])
def test_P2_residuals(variant, jitted):
    """a, h and h0 as they are: no shifted copy, nothing expanded, and b is not kept."""
    case, options = VARIANTS[variant]
    f = partial(linear_scan, **options)
    a, b, h0 = given(case)
    axis = case.axis % 3
    kept = jax.tree.leaves(jax.vjp(jax.jit(f) if jitted else f, a, b, h0)[1])
    expected = {
        "a": a.reshape((1,) * (3 - a.ndim) + a.shape),
        "h": jax.tree.leaves(f(a, b, h0))[0],
        "h0": jnp.expand_dims(h0.reshape((1,) * (2 - h0.ndim) + h0.shape), axis),
    }
    assert len(kept) == len(expected)
    for x, y in zip(kept, expected.values(), strict=True):
        same(x, y)
    alone = jax.tree.leaves(jax.vjp(lambda b: f(a, b, h0), b)[1])
    assert [x.shape for x in alone] == [expected["a"].shape]


@pytest.mark.parametrize("case", [FULL, SHARED], ids=["full", "shared a"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_P2_temporary_memory(case, dtype):
    """A call needs none, its gradient h alone; on a GPU also a kernel's workspace."""
    x = given(case, dtype)
    x = (*x[:2], x[2].astype(jnp.float32))

    def temporary(f, *args):
        return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes

    h = x[1].nbytes
    slack = 0.2 * h  # sums of da over the batch, small results
    assert temporary(linear_scan, *x) <= slack
    assert (
        temporary(lambda *x: jax.vmap(linear_scan, (None, 0, None))(*x), x[0], x[1][None], x[2])
        <= slack
    )
    assert temporary(partial(pullback, linear_scan), x[1], *x) <= h + slack

    def by_b(ct, b):
        return jax.vjp(lambda b: linear_scan(x[0], b, x[2]), b)[1](ct)

    assert temporary(by_b, x[1], x[1]) <= slack


def test_P2_memory_of_the_gradient_of_a_loss():
    """Beside arguments and gradients: h, and the cotangent that the loss makes of it."""
    x = given(FULL)
    loss = jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(linear_scan(*x))), (0, 1, 2))
    memory = jax.jit(loss).lower(*x).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 2.2 * x[1].nbytes


# ---- Dead code -----------------------------------------------------------------------------------


def test_unused_results_of_a_gradient_are_not_computed():
    """The unused da goes, with it the h that it reads, and with that the scan."""
    x = given(Case("", (2, 5, 3), h0=(2, 3)))

    def gradient(which, loss):
        return lambda *x: operator.itemgetter(*which)(jax.grad(loss, (0, 1, 2))(*x))

    linear = jax.jit(lambda *x: jnp.sum(linear_scan(*x)))
    curved = jax.jit(lambda *x: jnp.sum(jnp.sin(linear_scan(*x))))
    scan = ("scan", "a b h0", "h")
    assert calls(gradient((1,), linear), *x) == [("cotangent", "a g", "db")]
    assert calls(gradient((2,), linear), *x) == [("cotangent", "a g", "dh0")]
    assert calls(gradient((1, 2), linear), *x) == [("cotangent", "a g", "db dh0")]
    assert calls(gradient((1,), curved), *x) == [scan, ("cotangent", "a g", "db")]
    assert calls(gradient((0,), curved), *x) == [scan, ("cotangent", "a h h0 g", "da")]
    assert calls(gradient((0, 2), curved), *x) == [scan, ("cotangent", "a h h0 g", "da dh0")]
    for which in ((1,), (2,), (0, 2)):
        some = jax.jit(gradient(which, curved))(*x)
        jax.tree.map(same, some, gradient(which, curved)(*x))


def test_an_unused_state_is_not_computed():
    x = given(Case("", (2, 5, 3), h0=(2, 3)))
    run = partial(linear_scan, return_state=True)
    inner = jax.jit(run)
    for f in (run, inner):
        assert calls(lambda *x, f=f: f(*x)[0], *x) == [("scan", "a b h0", "h")]
        assert calls(lambda *x, f=f: jax.jvp(f, x, x)[1][0], *x) == [
            ("scan", "a b h0", "h"),
            ("tangent", "a h h0 da db dh0", "dh"),
        ]
        assert calls(lambda *x, f=f: f(*x)[1], *x) == [("scan", "a b h0", "state")]
        same(jax.jit(lambda *x, f=f: f(*x)[1])(*x), run(*x)[1])


def test_dead_code_never_changes_what_a_result_is_summed_over():
    """Here h alone has the batch that db is summed over; it has to stay."""
    rng = np.random.default_rng(0)
    a, g = (jnp.asarray(rng.uniform(size=(1, 5, 3))) for _ in range(2))
    h = jnp.asarray(rng.normal(size=(4, 5, 3)))
    recurrence = _primitives.Recurrence(1, 5, False, False, np.dtype(np.float64))
    results = [_primitives.Result(n, (1, 5, 3), np.dtype(np.float64)) for n in ("da", "db")]

    def both(a, h, g):
        return _primitives.cotangent(recurrence, {"a": a, "h": h, "g": g}, results)

    def db(a, h, g):
        return jax.jit(both)(a, h, g)[1]

    same(jax.jit(db)(a, h, g), both(a, h, g)[1])
    assert calls(db, a, h, g) == [("cotangent", "a h g", "da db")]


def test_dead_code_inside_control_flow_and_checkpoint():
    a, b, _ = given(Case("", (2, 5, 3), h0=(2, 3)))

    def loss(a, b):
        def layer(x, a):
            return linear_scan(a, x), None

        return jnp.sum(jax.lax.scan(layer, b, jnp.stack([a, a * 0.5]))[0])

    def by_b(a, b):
        return jax.grad(loss, (0, 1))(a, b)[1]

    assert calls(by_b, a, b) == [("cotangent", "a g", "db")]
    same(jax.jit(by_b)(a, b), jax.grad(loss, (0, 1))(a, b)[1])
