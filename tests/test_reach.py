"""The product of factors and how far a state reaches, against products in double precision."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import HALF_ULP, ROUNDINGS, state_dtype

from jax_scan import _reach
from jax_scan._reference import Recurrence

DTYPES = ["float32", "bfloat16", "float16", "float64", "complex64", "complex128"]
LEAST = 2.0**-4


def on_gpu():
    return jax.default_backend() == "gpu"


def exact_product(a):
    """Over axis 1, pair by pair: mantissas in double precision, and exponents."""
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    m, e = a.astype(wide), np.zeros(a.shape, np.int64)

    def normal(m, e):
        size = np.maximum(np.abs(m.real), np.abs(m.imag))
        _, up = np.frexp(np.where(np.isfinite(size), size, 1))
        down = np.clip(-up.astype(np.int64), -1000, 1000)
        return m * np.ldexp(1.0, down), e - down

    m, e = normal(m, e)
    while m.shape[1] > 1:
        if m.shape[1] % 2:
            m = np.concatenate([m, np.ones_like(m[:, :1])], 1)
            e = np.concatenate([e, np.zeros_like(e[:, :1])], 1)
        m, e = normal(m[:, ::2] * m[:, 1::2], e[:, ::2] + e[:, 1::2])
    e = np.clip(e, -5000, 5000)
    if wide is np.float64:
        return np.ldexp(m, e)
    return np.ldexp(m.real, e) + 1j * np.ldexp(m.imag, e)


def exact_reach(a, prefixes, state, reverse):
    """Within which prefix the product is nothing; small factors count as 1/16."""
    info = np.finfo(state)
    size = np.abs(a[:, ::-1] if reverse else a).astype(np.float64)
    reach = np.full((a.shape[0], 1, a.shape[2]), len(prefixes))
    for k, count in reversed(list(enumerate(prefixes))):
        first = size[:, :count]
        with np.errstate(over="ignore"):
            total = np.log2(np.maximum(first, LEAST)).sum(1, keepdims=True)
            growth = np.log2(np.maximum(first, 1)).sum(1, keepdims=True)
        found = (total < np.log2(float(info.tiny))) & (growth < np.log2(float(info.max)) / 2)
        reach[found] = k
    return reach


def found(*args):
    product, reach = _reach.product_and_reach(*args)
    return product, reach.least


def find(a, prefixes, reverse=False, reset=None, state=None):
    state = np.dtype(state or state_dtype(a.dtype))
    recurrence = Recurrence(1, a.shape[1], reverse, True, state)
    f = jax.jit(partial(found, recurrence, prefixes))
    given = {"a": jnp.asarray(a)} | ({} if reset is None else {"reset": jnp.asarray(reset)})
    return tuple(map(np.asarray, f(given)))


def same_products(actual, a, reach, prefixes):
    """Zero where the state is forgotten; else the product, or what it is beyond the dtype."""
    with np.errstate(over="ignore", invalid="ignore"):
        expected = exact_product(a)
        expected = np.where(reach < len(prefixes), 0, expected)
        rounded = expected.astype(actual.dtype)
    # The kernel rounds once; the loop at every step.
    steps = 2 if on_gpu() else a.shape[1]
    bound = steps * ROUNDINGS[actual.dtype.name] * HALF_ULP[actual.dtype.name]
    if a.dtype.itemsize // (1 + np.iscomplexobj(a)) == 8:  # no wider than the oracle
        bound += 4 * a.shape[1] * HALF_ULP["float64"]
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(rounded))
    infinite = np.isinf(rounded) & ~np.isnan(rounded)
    np.testing.assert_array_equal(actual[infinite], rounded[infinite])
    error = np.abs(actual[finite] - expected[finite])
    tiny = 4 * float(np.finfo(actual.dtype).tiny)
    assert (error <= bound * np.abs(expected[finite]) + tiny).all(), np.max(error)


def factors(shape, dtype, seed=0, spread=1.0):
    """Of either sign, or of any phase, with a product that is neither large nor small."""
    rng = np.random.default_rng(seed)
    logs = rng.normal(size=shape) * spread / np.sqrt(shape[1])
    a = np.exp(logs - logs.mean(1, keepdims=True) * rng.uniform(0, 1, (shape[0], 1, shape[2])))
    if np.dtype(dtype).kind == "c":
        a = a * np.exp(2j * np.pi * rng.uniform(size=shape))
    else:
        a = a * rng.choice([-1, 1], size=shape)
    return np.array(jnp.asarray(a, dtype))


SHAPES = [
    ((1, 1, 1), ()),
    ((1, 7, 3), (2, 5)),
    ((3, 257, 5), (32, 96)),
    ((2, 1024, 136), (128,)),
    ((1, 1025, 1030), (64, 128)),
    ((2, 4097, 1), (128, 512)),
    ((1, 20000, 64), (1024,)),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reverse", [False, True])
def test_E2_products(dtype, reverse):
    """Lengths and channels that fit vectors, and those that don't."""
    for seed, (shape, prefixes) in enumerate(SHAPES):
        a = factors(shape, dtype, seed)
        a[:, shape[1] // 2, shape[2] // 2] = 0
        if not prefixes and not on_gpu():
            continue
        actual, reach = find(a, prefixes or (1,), reverse)
        np.testing.assert_array_equal(reach, len(prefixes or (1,)))
        same_products(actual, a, reach, prefixes or (1,))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 10**6, 3), "float32"), ((1, 300_001, 8), "float64")]
)
def test_N2_products_of_many_factors(shape, dtype):
    a = factors(shape, dtype)
    actual, reach = find(a, (1024, 8192, 65536))
    same_products(actual, a, reach, (1024, 8192, 65536))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reverse", [False, True])
def test_S3_how_far_a_state_reaches(dtype, reverse):
    """Every channel by itself, at all prefixes."""
    prefixes = (32, 128, 512)
    rng = np.random.default_rng(0)
    for shape in ((2, 1536, 24), (1, 777, 3), (3, 600, 1)):
        a = factors(shape, dtype, spread=0.1)
        for o in range(shape[0]):
            for i in range(shape[2]):
                start = rng.choice([0, 33, 140, 1000])
                at = shape[1] - start - 300 if reverse else start
                a[o, max(at, 0) : at + 300 if at >= -300 else 0, i] *= a.dtype.type(1 / 64)
        actual, reach = find(a, prefixes, reverse)
        expected = exact_reach(a, prefixes, actual.dtype, reverse)
        np.testing.assert_array_equal(reach, expected)
        assert len(np.unique(expected)) > 1 or shape[2] == 1
        same_products(actual, a, reach, prefixes)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 0.0])
def test_N1_what_does_not_make_a_product_vanish(value):
    """What is not finite, growth before decay, and a few factors of zero."""
    a = np.full((1, 512, 5), 0.9999, np.float32)
    a[:, 10:16, 2] = value
    if value:
        a[:, 20:100, 2] = 0.1
    actual, reach = find(a, (128, 256))
    np.testing.assert_array_equal(reach, 2)
    assert np.isfinite(actual[..., [0, 1, 3, 4]]).all()
    if not value or np.isnan(value):
        np.testing.assert_array_equal(actual[0, 0, 2], value)


def test_S3_factors_that_do_not_depend_on_time():
    a = np.asarray([0.5, 0.99, 0.9999], np.float32).reshape(1, 1, 3)
    recurrence = Recurrence(1, 4096, False, True, np.dtype(np.float32))
    find = partial(found, recurrence, (256, 512))
    actual, reach = jax.jit(find)({"a": jnp.asarray(a)})
    assert np.ravel(reach).tolist() == [0, 2, 2]
    np.testing.assert_allclose(
        actual.ravel(), a.ravel().astype(float) ** 4096, rtol=1e-3, atol=1e-36
    )


@pytest.mark.parametrize("where", ["full", "batch", "time"])
def test_N1_resets_end_products(where):
    """A reset is the end of a state, whatever the factors are."""
    shape, prefixes = (2, 512, 4), (32, 128)
    a = factors(shape, "float32")
    a[0, 300, 1] = np.nan
    reset = np.zeros({"full": shape, "batch": (2, 512, 1), "time": (1, 512, 1)}[where], bool)
    reset[0, 40] = True
    reset[-1, 400] = True
    actual, reach = find(a, prefixes, reset=reset)
    any_of = [
        np.broadcast_to(reset[:, :count].any(1, keepdims=True), reach.shape)
        for count in (*prefixes, 512)
    ]
    np.testing.assert_array_equal(reach, np.where(any_of[0], 0, np.where(any_of[1], 1, 2)))
    np.testing.assert_array_equal(actual[any_of[2]], 0)
    wide = find(a[:1], prefixes, reset=np.broadcast_to(reset[:1], (3, *reset.shape[1:])))
    assert wide[0].shape[0] == wide[1].shape[0] == 3


@pytest.mark.parametrize("mapped", ["a", "reset", "both"])
def test_T1_products_under_vmap(mapped):
    recurrence = Recurrence(0, 256, False, True, np.dtype(np.float32))
    rng = np.random.default_rng(0)
    a = factors((3, 256, 4), "float32")
    a[1, :200] *= np.float32(0.1)
    reset = rng.uniform(size=(3, 256, 4)) < 1 / 200

    def f(a, reset):
        return found(recurrence, (32,), {"a": a, "reset": reset})

    axes = (1 if mapped != "reset" else None, 0 if mapped != "a" else None)
    a1, reset1 = np.moveaxis(a, 0, 1) if axes[0] else a[0], reset if mapped != "a" else reset[0]
    outs = jax.jit(jax.vmap(f, axes))(jnp.asarray(a1), jnp.asarray(reset1))
    for k in range(3):
        one = f(jnp.asarray(a[k if axes[0] else 0]), jnp.asarray(reset[k if mapped != "a" else 0]))
        for x, y in zip(outs, one, strict=True):
            np.testing.assert_allclose(x[k], y, rtol=1e-5)


@pytest.mark.gpu
def test_N1_products_do_not_overflow_on_their_way():
    """On a GPU the exponent is kept apart; subnormal numbers count, too."""
    rng = np.random.default_rng(0)
    for dtype, top in (("float32", 120), ("float64", 1000), ("complex64", 120), ("bfloat16", 120)):
        shape = (2, 3001, 12)
        exponents = rng.integers(-top, top, shape)
        ends = exponents.sum(1, keepdims=True)
        step = np.clip(-ends, -top // 2, top // 2)
        a = np.ldexp(rng.choice([-1.0, 1.0], shape), exponents)
        at = 0
        while np.abs(ends).max() > 0:  # the product is near 1
            step = np.clip(-ends, -top - exponents[:, at : at + 1], top - exponents[:, at : at + 1])
            a[:, at : at + 1] = np.ldexp(a[:, at : at + 1], step)
            ends += step
            at += 1
        a[1] *= np.where(np.arange(shape[1]) == 7, 2.0**-10, 1)[:, None]
        a = np.asarray(jnp.asarray(a, dtype))
        actual, reach = find(a, (64,))
        same_products(actual, a, np.ones_like(reach), (64,))


@pytest.mark.gpu
def test_N1_products_of_subnormal_numbers_and_infinities():
    a = np.ones((1, 4096, 8), np.float32)
    a[0, 5, :] = [1e-42, 1e-42, 0, np.inf, np.inf, np.nan, 1e-30, 1e30]
    a[0, 9, :] = [1e38, 1, np.inf, 2, 0, 0, 1e-30, 1e30]
    actual, reach = find(a, (1024,))
    assert (reach == 1).all()
    with np.errstate(invalid="ignore", over="ignore"):
        expected = (a[0, 5].astype(float) * a[0, 9]).astype(np.float32)
    np.testing.assert_allclose(actual[0, 0], expected, rtol=1e-6, atol=1e-45)


@pytest.mark.gpu
def test_V3_products_are_the_same_every_time():
    a = jnp.asarray(factors((1, 100_001, 64), "float32"))
    recurrence = Recurrence(1, a.shape[1], False, True, np.dtype(np.float32))
    f = jax.jit(partial(found, recurrence, (1024, 8192)))
    first = [np.asarray(x) for x in f({"a": a})]
    for _ in range(20):
        for x, y in zip(f({"a": a}), first, strict=True):
            np.testing.assert_array_equal(x, y)
