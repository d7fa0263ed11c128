"""What XLA sees: one custom call, row-major, no copies; `lax` elsewhere and for empty scans."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, Case, arguments
from oracles import Oracle, check, state_dtype
from programs import compiled, count, lowered

from jax_scan import _lowering, _native, linear_scan

CASE = Case("", (4, 50, 6), h0=(4, 6))


def given(case=CASE):
    return tuple(x for x in arguments(case)[:3] if x is not None)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_P1_one_custom_call_and_nothing_else(axis):
    b = np.ones((4, 5, 6), np.float32)
    step = b.shape[:axis] + b.shape[axis + 1 :]
    program = compiled(lambda *x: linear_scan(*x, axis=axis), b, b, np.ones(step, np.float32))
    assert count(program, "custom-call") == 1, program
    assert 'custom_call_target="jax_scan.v1.scan"' in program
    for operation in ("copy", "transpose", "fusion", "broadcast"):
        assert count(program, operation) == 0, program


def test_P2_shared_factors_are_not_expanded():
    a, b = given(Case("", (4, 50, 6), a=(6,)))
    program = compiled(linear_scan, a, b)
    assert "f32[1,1,6]{2,1,0}, f32[4,50,6]{2,1,0}}" in program
    assert count(program, "broadcast") == 0
    grad = compiled(jax.grad(lambda a, b: jnp.sum(linear_scan(a, b) ** 2), (0, 1)), a, b)
    assert count(grad, "custom-call") == 2
    # The sum over time is the kernel's, that over the batch is XLA's, and no array of b's shape is
    # made for it.
    assert "f32[4,1,6]" in grad


def test_P1_gradient_is_one_fused_call():
    program = lowered(jax.grad(lambda *x: jnp.sum(linear_scan(*x)), (0, 1, 2)), *given())
    assert program.count("@jax_scan.v1.scan") == program.count("@jax_scan.v1.cotangent") == 1
    assert 'operands = "a h h0 g"' in program
    assert 'results = "da db dh0' in program
    # A loss that is linear in b needs no scan at all for its gradient by b.
    a, b = given()[:2]
    program = compiled(jax.grad(lambda b: jnp.sum(linear_scan(a, b))), b)
    assert "jax_scan.v1.cotangent" in program
    assert "jax_scan.v1.scan" not in program


def test_X6_attributes():
    program = lowered(lambda *x: linear_scan(*x, reverse=True, return_state=True), *given())
    for attribute in (
        "axis = 1 : i64",
        "length = 50 : i64",
        "reverse = true",
        "has_h0 = true",
        'operands = "a b h0"',
        'results = "h state',
        'state = "float32"',
    ):
        assert attribute in program


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_other_platforms_use_lax(platform):
    def both(*x):
        out, pull = jax.vjp(lambda *x: linear_scan(*x, return_state=True), *x)
        return out, jax.jvp(linear_scan, x, x)[1], pull(out)

    program = lowered(both, *given(), platform=platform)
    assert "custom_call @jax_scan" not in program
    assert "stablehlo.while" in program


@pytest.mark.parametrize("dtype", DTYPES)
def test_N6_lax_and_kernel_agree(dtype):
    """The lowering for other platforms, run here."""
    eps = float(jnp.finfo(DTYPES[dtype]).eps)
    cases = [Case("", (3, 40, 5), a=(40, 1), reverse=True, reset=(40,))]
    if dtype == "float32":
        cases += [CASE, Case("", (7,), axis=-1)]
    for case in cases:
        a, b, h0, reset = arguments(case, dtype)
        options = {"axis": case.axis, "reverse": case.reverse, "reset": reset, "return_state": True}
        f = partial(linear_scan, **options)

        def everything(*x, f=f):
            out, pull = jax.vjp(f, *x)
            return out, jax.jvp(f, x, x)[1], pull(out)

        x = (a, b) if h0 is None else (a, b, h0)
        kernel = jax.jit(everything)(*x)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_lowering, "_has_kernel", lambda full: False)
            again = jax.jit(lambda *x, f=everything: f(*x))
            reference = again(*x)
            assert "jax_scan.v1" not in again.lower(*x).as_text()
        for x, y in zip(jax.tree.leaves(kernel), jax.tree.leaves(reference), strict=True):
            assert x.dtype == y.dtype
            x, y = (np.asarray(z, state_dtype(dtype)) for z in (x, y))
            np.testing.assert_allclose(x, y, rtol=0, atol=8 * eps * float(np.abs(y).max()))
        oracle = Oracle(a, b, h0, axis=case.axis, reverse=case.reverse, reset=reset)
        for x, y in zip(reference[0], oracle.values(), strict=True):
            check(x, y)


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 4, 3), (2, 4, 0)])
def test_E1_empty_scans_never_reach_a_kernel(shape):
    b = np.ones(shape, np.float32)
    program = lowered(
        jax.grad(lambda a, b: jnp.sum(linear_scan(a, b)), (0, 1)),
        np.ones(3, np.float32)[: shape[2]],
        b,
    )
    assert "jax_scan.v1" not in program


def test_more_alternating_axes_than_a_kernel_follows():
    shape = (2,) * 13 + (5,)
    rng = np.random.default_rng(0)
    b = rng.normal(size=shape).astype(np.float32)
    a = rng.uniform(0.5, 1, [1 if k % 2 else 2 for k in range(13)] + [5]).astype(np.float32)
    h = linear_scan(a, b, axis=-1)
    flat = linear_scan(np.broadcast_to(a, shape).reshape(-1, 5), b.reshape(-1, 5), axis=-1)
    np.testing.assert_array_equal(h, flat.reshape(shape))
    gradient = jax.grad(lambda a: jnp.sum(linear_scan(a, b, axis=-1)))(a)
    assert gradient.shape == a.shape


def test_X5_cuda_without_its_module_says_why(monkeypatch):
    monkeypatch.delitem(_native._modules, "cuda", raising=False)
    monkeypatch.setitem(_native._reasons, "cuda", "It was not built, for want of a compiler.")
    with pytest.raises(
        RuntimeError, match=r"jax_scan has no cuda kernel here. It was not built, for want"
    ):
        lowered(linear_scan, *given()[:2], platform="cuda")


def test_cuda_gets_a_workspace(monkeypatch):
    """Lowering for CUDA works without a GPU; the kernel's workspace is one more result."""
    asked = []

    class Module:
        @staticmethod
        def workspace_bytes(*args):
            asked.append(args)
            return 123

    monkeypatch.setitem(_native._modules, "cuda", Module)
    a, b, h0 = given()
    program = lowered(lambda *x: linear_scan(*x, return_state=True), a, b, h0, platform="cuda")
    assert asked == [("scan", 4, 50, 6, "float32")]
    assert 'results = "h state workspace"' in program
    assert "tensor<123xui8>" in program
    both = lowered(lambda *x: jax.vjp(linear_scan, *x)[1](b), a, b, h0, platform="cuda")
    assert 'results = "da db dh0 workspace"' in both


def test_cuda_is_asked_to_sum_da_over_what_shares_a(monkeypatch):
    """Over the last axes, or else the last before time, if it can; XLA does the rest."""
    asked = []
    sums = True

    class Module:
        @staticmethod
        def workspace_bytes(*_):
            return 123

        @staticmethod
        def summed_workspace_bytes(*args):
            asked.append(args)
            return 456 if sums else None

    monkeypatch.setitem(_native._modules, "cuda", Module)
    b = jnp.ones((4, 6, 5, 8))

    def da(*shape, axis=1):
        """The shape of the kernel's da, and that of the workspace."""

        def gradients(a):
            return jax.vjp(partial(linear_scan, axis=axis), a, b)[1](b)

        text = lowered(gradients, jnp.ones(shape), platform="cuda")
        (call,) = [line for line in text.splitlines() if "jax_scan.v1.cotangent" in line]
        results = call.split("-> ")[-1]
        assert 'results = "da db workspace"' in call
        found = re.findall(r"tensor<([\dx]+)x[fu]", results)
        return found[0], found[-1]

    dtypes = ("float64", *["float64"] * 4)
    assert da(4, 6, 1, 1) == ("4x6x1x1", "456")
    assert set(asked) == {(4, 6, 40, 40, 1, *dtypes)}
    asked.clear()
    assert da(4, 6, 5, 1) == ("4x6x5x1", "456")
    assert set(asked) == {(4, 6, 40, 8, 1, *dtypes)}
    asked.clear()
    assert da(6, 5, 8) == ("1x6x5x8", "456")
    assert set(asked) == {(4, 6, 40, 1, 4, *dtypes)}
    asked.clear()
    assert da(6, 5, 1) == ("4x6x5x1", "456")
    assert da(1, 6, 5, 8, axis=2) == ("4x6x5x8", "123")
    assert da(4, 1, 5, 8, axis=2) == ("4x1x5x8", "456")
    assert asked[-1] == (24, 5, 8, 1, 6, *dtypes)
    # Over time always, and nothing else with it.
    asked.clear()
    assert da(4, 1, 1, 1) == da(5, 8) == ("4x1x5x8", "123")
    assert da(4, 6, 5, 8) == ("4x6x5x8", "123")
    assert not asked
    sums = False
    assert da(4, 6, 1, 1) == da(6, 1, 1) == ("4x6x5x8", "123")


def test_the_cpu_kernel_sums_da_over_axes():
    def da(*shape, a):
        b = jnp.ones(shape, jnp.float32)

        def gradients(a):
            return jax.vjp(partial(linear_scan, axis=1), a, b)[1](b)

        text = lowered(gradients, jnp.ones(a, b.dtype), platform="cpu")
        (call,) = [line for line in text.splitlines() if "jax_scan.v1.cotangent" in line]
        return re.findall(r"tensor<([\dx]+)xf", call.split("-> ")[-1])[0]

    assert da(4, 6, 5, 16, a=(4, 6, 1, 1)) == "4x6x1x1"
    assert da(4, 6, 5, 16, a=(4, 6, 5, 1)) == "4x6x5x1"
    assert da(4, 6, 5, 16, a=(6, 5, 1)) == "4x6x5x1"
    assert da(4, 6, 1000, a=(4, 6, 1)) == "4x6x1"
    assert da(4, 60, 5, 16, a=(60, 5, 16)) == "1x60x5x16"
    # Over time, if at all.
    assert da(4, 6, 5, 16, a=(4, 1, 5, 1)) == "4x1x5x16"
    # Too few, or not neighbours, or no part of 16 to 256 that divides them, or short, or chunks of
    # time.
    assert da(4, 6, 5, 8, a=(4, 6, 5, 1)) == "4x6x5x8"
    assert da(4, 6, 5, 16, a=(4, 6, 1, 16)) == "4x6x5x16"
    assert da(4, 6, 5, 16, a=(6, 5, 16)) == "4x6x5x16"
    assert da(4, 6, 257, a=(4, 6, 1)) == "4x6x257"
    assert da(2, 2000, 40, a=(2, 2000, 1)) == "2x2000x40"
    assert da(4, 2000, 2, a=(2000, 2)) == "4x2000x2"


def test_jit_compiles_once():
    traced = []

    @jax.jit
    def f(a, b):
        traced.append(a)
        return linear_scan(a, b)

    a, b, *_ = given()
    f(a, b)
    f(b, a)
    assert len(traced) == 1
