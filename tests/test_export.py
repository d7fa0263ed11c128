"""`jax.export`: programs that outlive the process, with documented targets."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments
from jax import export
from oracles import Oracle, check, same
from programs import lax_scan

import jax_scan
from jax_scan import _native, linear_scan

CHECKS = jax_scan.export_checks()


def given(dtype="float32", length=64):
    return tuple(
        jnp.asarray(x)
        for x in arguments(Case("", (2, length, 3), h0=(2, 3)), dtype)[:3]
        if x is not None
    )


def loss(*x, scan=linear_scan):
    return jnp.sum(jnp.sin(scan(*x)))


GRAD = jax.grad(loss, (0, 1, 2))


def all_same(actual, expected):
    jax.tree.map(same, actual, expected)


def test_X7_target_names():
    """Exports hold these names: they may only ever be added to."""
    assert {*_native.TARGETS.values(), _native.SUMMARY} >= {
        "jax_scan.v1.scan",
        "jax_scan.v1.tangent",
        "jax_scan.v1.cotangent",
        "jax_scan.v1.summary",
    }
    text = str(export.export(jax.jit(GRAD), disabled_checks=CHECKS)(*given()).mlir_module())
    assert "@jax_scan.v1.scan" in text
    assert "@jax_scan.v1.cotangent" in text


def test_X7_export_round_trip():
    x = given("float64")
    exported = export.export(jax.jit(linear_scan), disabled_checks=CHECKS)(*x)
    loaded = export.deserialize(exported.serialize(vjp_order=2))
    same(loaded.call(*x), lax_scan(*x))

    def twice(f):
        return lambda *x: jnp.sum(jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))))(*x) ** 2)

    for order in (lambda f: lambda *x: jnp.sum(jnp.sin(f(*x))), twice):
        grads = jax.grad(order(loaded.call), (0, 1, 2))(*x)
        all_same(grads, jax.grad(order(lax_scan), (0, 1, 2))(*x))
    with pytest.raises(ValueError, match="compatibility guarantees"):
        export.export(jax.jit(linear_scan))(*x)


def test_X7_export_runs_in_a_new_process(python, tmp_path):
    """Value, gradient, mapped and with a state; the other process sees nothing but bytes."""
    x = given()
    programs = {
        "value": partial(linear_scan, return_state=True),
        "gradient": GRAD,
        "tangent": lambda *x: jax.jvp(linear_scan, x, x)[1],
        "mapped": lambda a, b, h0: jax.vmap(linear_scan, (None, 0, None))(a, b[None], h0),
    }
    for name, f in programs.items():
        exported = export.export(jax.jit(f), platforms=["cpu"], disabled_checks=CHECKS)(*x)
        (tmp_path / name).write_bytes(exported.serialize())
    np.savez(tmp_path / "x.npz", *x)
    python(
        f"""
        import pathlib, numpy as np, jax
        from jax import export
        import jax_scan
        folder = pathlib.Path({str(tmp_path)!r})
        x = list(np.load(folder / "x.npz").values())
        for name in {list(programs)}:
            loaded = export.deserialize(bytearray((folder / name).read_bytes()))
            np.savez(folder / f"{{name}}.npz", *jax.tree.leaves(loaded.call(*x)))
        """
    )
    found = {name: list(np.load(tmp_path / f"{name}.npz").values()) for name in programs}
    oracle = Oracle(*x)
    for actual, expected in zip(found["value"], oracle.values(), strict=True):
        check(actual, expected)
    check(found["tangent"][0], oracle.tangents(*x)[0])
    same(found["mapped"][0][0], found["value"][0])
    wide = jax.grad(partial(loss, scan=lax_scan), (0, 1, 2))(*(y.astype(float) for y in x))
    for actual, expected in zip(found["gradient"], wide, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_X7_export_needs_the_package_where_it_runs(python, tmp_path):
    """A process that has not imported jax_scan is told which target is missing."""
    x = given()
    exported = export.export(jax.jit(linear_scan), platforms=["cpu"], disabled_checks=CHECKS)(*x)
    (tmp_path / "f").write_bytes(exported.serialize())
    out = python(
        f"""
        import pathlib, numpy as np
        from jax import export
        loaded = export.deserialize(bytearray(pathlib.Path({str(tmp_path / "f")!r}).read_bytes()))
        try:
            loaded.call(*(np.ones(s.shape, s.dtype) for s in loaded.in_avals))
        except Exception as error:
            print("jax_scan.v1.scan" in str(error), type(error).__name__)
        """
    )
    assert out.split() == ["True", "JaxRuntimeError"]


def shapes(symbols, dtype=np.float32):
    m, n, k = export.symbolic_shape(symbols)
    return [jax.ShapeDtypeStruct(s, dtype) for s in ((m, n, k), (m, n, k), (m, k))]


def test_X7_unknown_batch_and_channels_on_the_cpu():
    """Value and gradient; one export serves every size."""

    def both(*x):
        return linear_scan(*x, return_state=True), jax.grad(loss, (0, 1, 2))(*x)

    exported = export.export(jax.jit(both), platforms=["cpu"], disabled_checks=CHECKS)(
        *shapes("m, 16, k", np.float64)
    )
    loaded = export.deserialize(exported.serialize())
    if jax.default_backend() != "cpu":
        return
    for m, k in ((1, 1), (2, 3), (5, 40)):
        x = arguments(Case("", (m, 16, k), h0=(m, k)), "float64")[:3]
        values, grads = loaded.call(*x)
        all_same(values, lax_scan(*x, return_state=True))
        all_same(grads, jax.grad(partial(loss, scan=lax_scan), (0, 1, 2))(*map(jnp.asarray, x)))


def test_X7_unknown_sizes_under_vmap_and_shared_factors():
    m, k = export.symbolic_shape("m, k")
    args = (jax.ShapeDtypeStruct((k,), np.float32), jax.ShapeDtypeStruct((m, 16, k), np.float32))
    f = jax.jit(jax.vmap(lambda a, b: jax.grad(loss)(a, b), (None, 0)))
    exported = export.export(f, platforms=["cpu"], disabled_checks=CHECKS)(*args)
    if jax.default_backend() == "cpu":
        a, b, *_ = arguments(Case("", (4, 16, 3), a=(3,)), "float32")
        expected = [jax.grad(partial(loss, scan=lax_scan))(jnp.asarray(a), item) for item in b]
        np.testing.assert_allclose(exported.call(a, b), expected, rtol=1e-4, atol=1e-5)


def test_X7_an_unknown_length_is_refused():
    with pytest.raises(ValueError, match="length of the time axis must be known, got n"):
        export.export(jax.jit(linear_scan), disabled_checks=CHECKS)(*shapes("m, n, k"))


def test_X7_unknown_sizes_on_cuda_are_refused(monkeypatch):
    """A kernel's workspace depends on them."""
    monkeypatch.setitem(_native._modules, "cuda", object())
    for f in (linear_scan, GRAD, lambda *x: jax.jvp(linear_scan, x, x)):
        with pytest.raises(ValueError, match=r"on CUDA all sizes of a scan must be known, got \(m"):
            export.export(jax.jit(f), platforms=["cuda"], disabled_checks=CHECKS)(
                *shapes("m, 64, k")
            )


def test_X7_export_for_another_platform(monkeypatch):
    """From a machine without a GPU for both platforms."""

    class Module:
        @staticmethod
        def workspace_bytes(*_):
            return 16

    monkeypatch.setitem(_native._modules, "cuda", Module)
    x = given()
    exported = export.export(jax.jit(GRAD), platforms=["cpu", "cuda"], disabled_checks=CHECKS)(*x)
    assert exported.platforms == ("cpu", "cuda")
    if jax.default_backend() == "cpu":
        all_same(exported.call(*x), GRAD(*x))


def test_X7_export_without_kernels_needs_no_exceptions():
    """For a TPU the program is all XLA's own, unknown sizes included."""
    exported = export.export(jax.jit(GRAD), platforms=["tpu"])(*shapes("m, 16, k"))
    assert "@jax_scan" not in str(exported.mlir_module())
    assert export.deserialize(exported.serialize()).platforms == ("tpu",)


@pytest.mark.gpu
def test_X7_export_on_a_gpu():
    """The round trip with the CUDA target, sizes known."""
    x = given("float64", 1000)
    for f, reference in (
        (linear_scan, lax_scan),
        (GRAD, jax.grad(partial(loss, scan=lax_scan), (0, 1, 2))),
    ):
        exported = export.export(jax.jit(f), disabled_checks=CHECKS)(*x)
        assert exported.platforms == ("cuda",)
        all_same(export.deserialize(exported.serialize()).call(*x), reference(*x))
