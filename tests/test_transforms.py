"""Compositions with the rest of JAX."""

from __future__ import annotations

import threading
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracles import Oracle, check, same
from programs import lax_scan, scans

import jax_scan
from jax_scan import _native, linear_scan

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


def test_X3_donation():
    a, b, _ = given(dtype="float32")
    expected = np.asarray(linear_scan(a, b))
    kept = np.asarray(b).copy()
    same(jax.jit(linear_scan)(a, b), expected)
    same(b, kept)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        same(jax.jit(linear_scan, donate_argnums=1)(a, b), expected)


def test_X2_transposed_inside_jit():
    case = Case("", (2, 3, 9))
    a, b = given(case)
    swapped = jax.jit(lambda a, b: linear_scan(a.swapaxes(1, 2), b.swapaxes(1, 2)).swapaxes(1, 2))
    same(swapped(a, b), linear_scan(a, b, axis=-1))


def test_X2_custom_layout():
    from jax.experimental.layout import Format, Layout

    a, b, _ = given()
    put = Format(
        Layout(major_to_minor=(2, 1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    turned = jax.device_put(b, put)
    assert turned.format.layout.major_to_minor == (2, 1, 0)
    same(jax.jit(linear_scan)(a, turned), linear_scan(a, b))
    same(linear_scan(a, turned), linear_scan(a, b))


def test_X7_export_round_trip():
    x = given(dtype="float32")
    checks = jax_scan.export_checks()
    exported = export.export(jax.jit(linear_scan), disabled_checks=checks)(*x)
    loaded = export.deserialize(exported.serialize(vjp_order=1))
    same(loaded.call(*x), linear_scan(*x))
    grads = jax.grad(lambda *x: jnp.sum(jnp.sin(loaded.call(*x))), (0, 1, 2))(*x)
    all_same(grads, GRAD(*x))
    with pytest.raises(ValueError, match="compatibility guarantees"):
        export.export(jax.jit(linear_scan))(*x)


def test_X7_export_with_unknown_sizes(monkeypatch):
    """Batch and channels may be symbolic where there is one device; the length may not."""
    a, b, h0 = given(dtype="float32")
    checks = jax_scan.export_checks()
    f = jax.jit(lambda *x: linear_scan(*x, return_state=True))

    def shapes(symbols):
        m, n, k = export.symbolic_shape(symbols)
        return [jax.ShapeDtypeStruct(s, np.float32) for s in ((m, n, k), (m, n, k), (m, k))]

    exported = export.export(f, platforms=["cpu"], disabled_checks=checks)(*shapes("m, 64, k"))
    if jax.default_backend() == "cpu":
        all_same(exported.call(a, b, h0), f(a, b, h0))
    with pytest.raises(ValueError, match="length of the time axis must be known"):
        export.export(f, disabled_checks=checks)(*shapes("m, n, k"))
    monkeypatch.setitem(_native._modules, "cuda", object())
    with pytest.raises(ValueError, match="on CUDA all sizes of a scan must be known"):
        export.export(f, platforms=["cuda"], disabled_checks=checks)(*shapes("m, 64, k"))


def test_X7_export_for_another_platform(monkeypatch):
    """From a machine without a GPU for both platforms."""

    class Module:
        @staticmethod
        def workspace_bytes(*_):
            return 16

    monkeypatch.setitem(_native._modules, "cuda", Module)
    x = given(dtype="float32")
    exported = export.export(
        jax.jit(GRAD), platforms=["cpu", "cuda"], disabled_checks=jax_scan.export_checks()
    )(*x)
    assert exported.platforms == ("cpu", "cuda")
    if jax.default_backend() == "cpu":
        all_same(exported.call(*x), GRAD(*x))


def test_X4_many_threads():
    a, b = given(Case("", (2, 256, 8)))
    inside = jax.jit(lambda a, b: jnp.sum(linear_scan(a, b @ jnp.ones((8, 8)))))
    expected, total = np.asarray(linear_scan(a, b)), float(inside(a, b))
    wrong = []

    def work():
        try:
            for _ in range(50):
                if not np.array_equal(linear_scan(a, b), expected):
                    wrong.append("value")
            if abs(float(inside(a, b)) - total) > 1e-9 * abs(total):
                wrong.append("sum")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads)
    assert not wrong


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
