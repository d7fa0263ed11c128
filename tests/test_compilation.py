"""Ahead of time, cached, in constant time; layouts and donated buffers."""

from __future__ import annotations

import itertools
import re
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments
from oracles import same
from programs import compiled, count, lax_scan

from jax_scan import linear_scan

CASE = Case("", (2, 64, 3), h0=(2, 3))


def given(case=CASE, dtype="float64"):
    return tuple(jnp.asarray(x) for x in arguments(case, dtype)[:3] if x is not None)


def loss(*x, scan=linear_scan):
    return jnp.sum(jnp.sin(scan(*x)))


GRAD = jax.grad(loss, (0, 1, 2))
EXPECTED_GRAD = jax.grad(partial(loss, scan=lax_scan), (0, 1, 2))


def all_same(actual, expected):
    jax.tree.map(same, actual, expected)


# ---- Ahead of time -------------------------------------------------------------------------------


def test_ahead_of_time():
    """From shapes alone; the executable takes no others, and its cost can be asked for."""
    x = given()
    avals = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in x]
    for f, expected in (
        (linear_scan, lax_scan(*x)),
        (GRAD, EXPECTED_GRAD(*x)),
        (
            jax.vmap(linear_scan, (None, None, 0)),
            jax.vmap(lax_scan, (None, None, 0))(*x[:2], x[2][None]),
        ),
    ):
        mapped = f not in (linear_scan, GRAD)
        args = (*avals[:2], jax.ShapeDtypeStruct((1, 2, 3), x[2].dtype)) if mapped else avals
        run = jax.jit(f).lower(*args).compile()
        all_same(run(*x[:2], x[2][None] if mapped else x[2]), expected)
        assert run.memory_analysis() is not None
    with pytest.raises(TypeError, match="differ from the types"):
        run(*(y.astype(np.float32) for y in x))


def test_static_arguments():
    x = given()
    f = jax.jit(linear_scan, static_argnames=("axis", "reverse", "return_state", "out_dtype"))
    for reverse in (False, True):
        same(f(*x, reverse=reverse), lax_scan(*x, reverse=reverse))
    assert f(*x, axis=1, return_state=True, out_dtype=jnp.float32)[0].dtype == np.float32


def test_X7_persistent_cache(python, tmp_path):
    """A second process compiles nothing: values, gradients and mapped calls come from the cache."""
    code = """
        import jax, jax.numpy as jnp
        from jax import monitoring
        from jax_scan import linear_scan
        events = []
        monitoring.register_event_listener(lambda name, **_: events.append(name.rsplit("/", 1)[1]))
        a, b = jnp.full((2, 30, 3), 0.5), jnp.ones((2, 30, 3))
        loss = lambda a, b: jnp.sum(jnp.sin(linear_scan(a, b)))
        total = jax.jit(linear_scan)(a, b).sum() + jax.jit(jax.grad(loss))(a, b).sum()
        total += jax.jit(jax.vmap(linear_scan, (None, 0)))(a, b[None]).sum()
        print(events.count("cache_hits"), events.count("cache_misses"), float(total))
    """
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first = python(code, **env).split()
    files = sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith("-atime"))
    second = python(code, **env).split()
    assert int(first[1]) > 0
    assert second == [str(int(first[0]) + int(first[1])), "0", first[2]]
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith("-atime")) == files


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_P2_compile_time_does_not_grow_with_the_length(dtype):
    """Processor time, of the best of three."""
    cost = {}
    for length, order in itertools.product((2**6, 2**16), (linear_scan, GRAD)):
        x = [jax.ShapeDtypeStruct(s, np.dtype(dtype)) for s in ((2, length, 3),) * 2 + ((2, 3),)]
        if dtype == "complex64" and order is GRAD:
            order = jax.grad(lambda *x: jnp.sum(jnp.abs(linear_scan(*x))), (0, 1, 2))
        taken = []
        for _ in range(3):
            jax.clear_caches()
            start = time.process_time()
            jax.jit(order).lower(*x).compile()
            taken.append(time.process_time() - start)
        cost.setdefault(length, []).append(min(taken))
    (short, short_grad), (long, long_grad) = cost.values()
    assert max(long, short) < 0.5, cost
    assert max(long_grad, short_grad) < 1, cost
    assert long < 3 * short + 0.05, cost
    assert long_grad < 3 * short_grad + 0.05, cost


# ---- Donation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("donated", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("f", ["value", "gradient", "with neighbours"])
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_X3_donation(f, donated):
    """Right when donated, and what is not donated stays as it was."""
    x = given(dtype="float32")

    def neighbours(scan, a, b, h0):
        h, state = scan(a * 0.9, b + 1, h0 - 1, return_state=True)
        return h * b, state + h0, a + 1

    function, reference = {
        "value": (linear_scan, lax_scan),
        "gradient": (GRAD, EXPECTED_GRAD),
        "with neighbours": (partial(neighbours, linear_scan), partial(neighbours, lax_scan)),
    }[f]
    expected = reference(*(y.astype(np.float64) for y in x))
    copies = [np.array(y) for y in x]
    result = jax.jit(function, donate_argnums=donated)(*x)
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    for k, (now, before) in enumerate(zip(x, copies, strict=True)):
        if k not in donated:
            np.testing.assert_array_equal(now, before)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_X3_donated_state_in_a_loop_of_calls():
    """The last state handed from call to call, as in decoding."""
    a, b, h0 = given()

    @partial(jax.jit, donate_argnums=2)
    def step(a, b, state):
        return linear_scan(a, b, state, return_state=True)

    state, expected = jnp.array(h0), h0
    for _ in range(4):
        h, state = step(a, b, state)
        reference, expected = lax_scan(a, b, expected, return_state=True)
        same(h, reference)
        same(state, expected)


def test_X3_no_operand_shares_memory_with_a_result():
    """Such a call would copy each operand that the caller still needs."""
    program = compiled(lambda *x: (linear_scan(*x), GRAD(*x)), *given())
    assert "jax_scan.v1.cotangent" in program
    assert "output_to_operand_aliasing" not in program
    assert count(program, "copy") == 0
    between = jax.jit(lambda a, b: linear_scan(a, b * 2) + 1, donate_argnums=1)
    a, b, _ = given()
    program = str(between.lower(a, b).compile().as_text())
    assert "input_output_alias" in program
    assert count(program, "copy") == 0


# ---- Layouts -------------------------------------------------------------------------------------


def test_X2_row_major_is_asked_for():
    """Of every operand and result, in each of the three operations."""

    def all_three(*x):
        return jax.jvp(linear_scan, x, x), GRAD(*x)

    program = compiled(all_three, *given(dtype="float32"))
    call = r"= (.*?) custom-call\(.*?operand_layout_constraints=\{(.*?\})\}"
    found = re.findall(call, program)
    assert len(found) == 3, program
    for shapes in itertools.chain(*found):
        layouts = re.findall(r"f32\[[\d,]+\](\{[\d,]*\})", shapes)
        assert layouts
        assert set(layouts) == {"{2,1,0}"}


def test_X2_transposed_inside_jit():
    a, b = given(Case("", (2, 3, 9)))
    swapped = jax.jit(lambda a, b: linear_scan(a.swapaxes(1, 2), b.swapaxes(1, 2)).swapaxes(1, 2))
    same(swapped(a, b), lax_scan(a, b, axis=-1))
    grads = jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(swapped(*x))), (0, 1)))(a, b)
    expected = jax.grad(lambda *x: jnp.sum(jnp.sin(lax_scan(*x, axis=-1))), (0, 1))(a, b)
    all_same(grads, expected)


def test_X2_custom_layout():
    from jax.experimental.layout import Format, Layout

    a, b, _ = given()
    put = Format(
        Layout(major_to_minor=(2, 1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    turned = jax.device_put(b, put)
    assert turned.format.layout.major_to_minor == (2, 1, 0)
    same(jax.jit(linear_scan)(a, turned), lax_scan(a, b))
    same(linear_scan(a, turned), lax_scan(a, b))
    laid_out = jax.jit(linear_scan, out_shardings=put)(a, turned)
    assert laid_out.format.layout.major_to_minor == (2, 1, 0)
    same(laid_out, lax_scan(a, b))
