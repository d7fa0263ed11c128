"""What steps are as a whole, and how far a state reaches, against loops in double precision."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import HALF_ULP, ROUNDINGS, Oracle, check, state_dtype

from jax_scan import _sequence, _summary
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


def recurrence_of(a, b, reverse=False, axis=1):
    return Recurrence(axis, b.shape[axis], reverse, True, np.dtype(state_dtype(a.dtype, b.dtype)))


def summary(a, b, prefixes=(), reverse=False, reset=None):
    """A and H."""
    f = jax.jit(partial(_summary.summary, recurrence_of(a, b, reverse), prefixes))
    given = {"a": a, "b": b} | ({} if reset is None else {"reset": reset})
    return tuple(map(np.asarray, f({name: jnp.asarray(x) for name, x in given.items()})))


def reach(a, prefixes, reverse=False, reset=None):
    f = jax.jit(partial(_summary.reach, recurrence_of(a, a, reverse), prefixes))
    given = {"a": a} | ({} if reset is None else {"reset": reset})
    return np.asarray(f({name: jnp.asarray(x) for name, x in given.items()}))


def from_zero(a, b, reverse=False, reset=None):
    """H, with a bound on its error."""
    state = np.zeros((b.shape[0], 1, b.shape[2]), state_dtype(a.dtype, b.dtype))
    return Oracle(a, b, state[:, 0], axis=1, reverse=reverse, reset=reset).values()[1]


def checked(found, a, b, reverse=False, reset=None, forgotten=False):
    product, result = found
    expected = from_zero(a, b, reverse, reset)
    value = expected.value.reshape(result.shape)
    check(result, expected._replace(value=value, bound=expected.bound.reshape(result.shape)))
    same_products(product, a, forgotten)


def same_products(actual, a, forgotten=False):
    """Zero where the state is forgotten; else the product, or what it is beyond the dtype."""
    with np.errstate(over="ignore", invalid="ignore"):
        expected = exact_product(a)
        expected = np.where(forgotten, 0, expected)
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


def inputs(shape, dtype, seed=1):
    rng = np.random.default_rng(seed)
    b = rng.uniform(-1, 1, shape)
    if np.dtype(dtype).kind == "c":
        b = b + 1j * rng.uniform(-1, 1, shape)
    return np.array(jnp.asarray(b, dtype))


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
def test_E2_summaries(dtype, reverse):
    """Lengths and channels that fit vectors, and those that don't."""
    for seed, (shape, prefixes) in enumerate(SHAPES):
        a, b = factors(shape, dtype, seed), inputs(shape, dtype, seed)
        checked(summary(a, b, prefixes, reverse), a, b, reverse)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 10**6, 3), "float32"), ((1, 300_001, 8), "float64")]
)
def test_N2_summaries_of_many_steps(shape, dtype):
    a, b = factors(shape, dtype), inputs(shape, dtype)
    checked(summary(a, b, (1024, 8192, 65536)), a, b)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 300, 1), None),
        ((1, 300, 6), None),
        ((2, 300, 1), None),
        ((1, 1, 6), None),
        ((2, 300, 6), (1, 300, 6)),
    ],
)
def test_operands_that_are_shared(dtype, shapes):
    """Of the factors or the inputs, over batch, channels or time."""
    of_a, of_b = shapes[0], shapes[1] or (2, 300, 6)
    a, b = factors(of_a, dtype), inputs(of_b, dtype)
    full = (2, 300, 6)
    recurrence = recurrence_of(a, b)
    for prefixes in ((), (64,)):
        found = jax.jit(partial(_summary.summary, recurrence, prefixes))({"a": a, "b": b})
        assert found[0].shape == found[1].shape == (2, 1, 6)
        wide = [np.broadcast_to(x, full) for x in (a, b)]
        checked(list(map(np.asarray, found)), *wide)


def test_types_that_differ():
    a, b = factors((2, 300, 6), "float32"), inputs((2, 300, 6), "bfloat16")
    checked(summary(a, b, (64,)), a, b)
    a, b = factors((2, 300, 6), "float32"), inputs((2, 300, 6), "complex64")
    product, result = summary(a, b, (64,))
    assert product.dtype == result.dtype == np.complex64
    checked((product, result), a.astype(np.complex64), b)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "complex128"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("within", [0, 1, 2])
def test_S3_no_more_is_read_than_what_is_not_forgotten(dtype, reverse, within):
    """What lies before the last steps may be anything, what lies in them counts."""
    prefixes = (128, 512, 900)
    shape, starts = (2, 1536, 24), (128, 400, 800)
    a, b = factors(shape, dtype, spread=0.1), inputs(shape, dtype)
    bits = 40 if state_dtype(a.dtype) in ("float64", "complex128") else 5
    last = shape[1] - starts[within]
    a[:, last : last + 80] *= a.dtype.type(2.0**-bits)
    before = shape[1] - prefixes[within]
    for place, is_read in ((before - 1, False), (before, True)):
        given = [a.copy(), b.copy()]
        given[1][1, place, 5] = np.nan
        if reverse:
            given = [x[:, ::-1].copy() for x in given]
        product, result = summary(*given, prefixes, reverse)
        assert not product.any()
        assert np.isnan(result[1, 0, 5]) == is_read
        steps = [x[:, : prefixes[within]] if reverse else x[:, before:] for x in given]
        if not is_read:
            checked((product, result), *steps, reverse, forgotten=True)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_S3_every_channel_may_forget_by_itself(dtype):
    """Some within the first prefix, some within another, some not; A and H are right in all."""
    shape = (2, 2000, 200)
    a, b = factors(shape, dtype, spread=0.1), inputs(shape, dtype)
    bits = 40 if dtype == "complex128" else 5
    for channel, start in ((0, 100), (3, 700), (150, 300), (180, 120)):
        a[:, 2000 - start : 2080 - start, channel] *= a.dtype.type(2.0**-bits)
    product, result = summary(a, b, (128, 512, 900))
    assert not product[..., [0, 3, 150, 180]].any()
    checked((product, result), a, b)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_N1_what_does_not_make_a_product_vanish(value):
    """What is not finite, and growth before decay."""
    a = np.full((1, 512, 5), 0.9999, np.float32)
    a[:, 410:416, 2] = value
    a[:, 420:500, 2] = 0.01
    b = np.ones_like(a)
    b[:, :100] = np.nan
    product, result = summary(a, b, (128, 256))
    assert np.isnan(result).all()  # all has been read
    assert np.isfinite(product[..., [0, 1, 3, 4]]).all()
    assert np.isnan(product[0, 0, 2]) == np.isnan(value)


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [("float32", 1e-37), ("complex64", 1e-30), ("float64", 1e-200), ("complex128", 1e-200)],
)
def test_N1_a_tiny_factor_does_not_forget(dtype, factor):
    """A large state before it would still make a difference."""
    a, b = np.full((1, 512, 4), 0.9999, dtype), np.zeros((1, 512, 4), dtype)
    a[:, 500] = factor
    b[:, 300] = 1 / factor
    product, result = summary(a, b, (128, 256))
    assert (product != 0).all()
    checked((product, result), a, b)


def test_N1_a_factor_of_zero_forgets():
    a, b = np.full((1, 512, 4), 0.9999, np.float32), np.ones((1, 512, 4), np.float32)
    a[:, 500] = 0
    b[:, 300] = np.nan
    product, result = summary(a, b, (128, 256))
    np.testing.assert_array_equal(product, 0)
    checked((product, result), a[:, 384:], b[:, 384:], forgotten=True)


@pytest.mark.parametrize("where", ["full", "batch", "time"])
@pytest.mark.parametrize("reverse", [False, True])
def test_N1_resets_end_products(where, reverse):
    """A reset is the end of a state, whatever came before."""
    shape, prefixes = (2, 512, 4), (32, 128)
    a, b = factors(shape, "float32"), inputs(shape, "float32")
    reset = np.zeros({"full": shape, "batch": (2, 512, 1), "time": (1, 512, 1)}[where], bool)
    reset[:, 490] = True
    b[:, 300] = np.nan
    a[:, 489] = np.nan
    given = [x[:, ::-1].copy() if reverse else x for x in (a, b, reset)]
    product, result = summary(*given[:2], prefixes, reverse, given[2])
    np.testing.assert_array_equal(product, 0)
    last = [x[:, :32] if reverse else x[:, -32:] for x in given]
    last[0] = np.nan_to_num(last[0])
    expected = from_zero(*last[:2], reverse, np.broadcast_to(last[2][..., 0], last[0].shape[:2]))
    check(result[:, 0], expected)


@pytest.mark.parametrize("mapped", ["a", "b", "reset", "all"])
def test_T1_summaries_under_vmap(mapped):
    recurrence = Recurrence(0, 256, False, True, np.dtype(np.float32))
    rng = np.random.default_rng(0)
    given = {
        "a": factors((3, 256, 4), "float32"),
        "b": inputs((3, 256, 4), "float32"),
        "reset": rng.uniform(size=(3, 256, 4)) < 1 / 200,
    }
    given["a"][1] *= np.float32(0.01)

    def f(a, b, reset):
        operands = {"a": a, "b": b, "reset": reset}
        return [
            *_summary.summary(recurrence, (64,), operands),
            _summary.reach(recurrence, (64,), operands),
        ]

    axes = [(1 if name == "a" else 0) if mapped in (name, "all") else None for name in given]
    args = [
        x[0] if axis is None else np.moveaxis(x, 0, axis)
        for x, axis in zip(given.values(), axes, strict=True)
    ]
    outs = jax.jit(jax.vmap(f, axes))(*args)
    for k in range(3):
        one = f(
            *(
                jnp.asarray(x[0 if axis is None else k])
                for x, axis in zip(given.values(), axes, strict=True)
            )
        )
        for x, y in zip(outs, one, strict=True):
            np.testing.assert_allclose(x[k], y, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
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
        expected = exact_reach(a, prefixes, np.dtype(state_dtype(a.dtype)), reverse)
        np.testing.assert_array_equal(reach(a, prefixes, reverse), expected)
        assert len(np.unique(expected)) > 1 or shape[2] == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 0.0])
def test_N1_states_that_reach_on(value):
    """What is not finite, growth before decay, and a few factors of zero."""
    a = np.full((1, 512, 5), 0.9999, np.float32)
    a[:, 10:16, 2] = value
    if value:
        a[:, 20:100, 2] = 0.1
    np.testing.assert_array_equal(reach(a, (128, 256)), 2)


def test_S3_factors_that_do_not_depend_on_time():
    a = np.asarray([0.5, 0.99, 0.9999], np.float32).reshape(1, 1, 3)
    b = inputs((1, 4096, 3), "float32")
    recurrence = recurrence_of(a, b)
    find = jax.jit(partial(_summary.reach, recurrence, (256, 512)))
    assert np.ravel(find({"a": a})).tolist() == [0, 2, 2]
    found = jax.jit(partial(_summary.summary, recurrence, (256, 512)))({"a": a, "b": b})
    np.testing.assert_allclose(
        np.ravel(found[0]), a.ravel().astype(float) ** 4096, rtol=1e-3, atol=1e-36
    )
    expected = from_zero(np.broadcast_to(a, b.shape), b)
    check(np.asarray(found[1])[:, 0], expected)


@pytest.mark.parametrize("where", ["full", "batch", "time"])
def test_S3_states_reach_to_resets(where):
    shape, prefixes = (2, 512, 4), (32, 128)
    a = factors(shape, "float32")
    a[0, 300, 1] = np.nan
    reset = np.zeros({"full": shape, "batch": (2, 512, 1), "time": (1, 512, 1)}[where], bool)
    reset[0, 40] = True
    reset[-1, 400] = True
    found = reach(a, prefixes, reset=reset)
    any_of = [
        np.broadcast_to(reset[:, :count].any(1, keepdims=True), found.shape) for count in prefixes
    ]
    np.testing.assert_array_equal(found, np.where(any_of[0], 0, np.where(any_of[1], 1, 2)))
    wide = reach(a[:1], prefixes, reset=np.broadcast_to(reset[:1], (3, *reset.shape[1:])))
    assert wide.shape[0] == 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
def test_S3_cotangents_passed_back(dtype, reverse, forgets):
    """What the gradient sends to the shard before, by the kernel where there is one."""
    shape, prefixes = (2, 700, 6), (128,)
    a, g = factors(shape, dtype, spread=0.1), inputs(shape, dtype)
    state = state_dtype(a.dtype)
    gstate = inputs((2, 1, 6), state, 3)
    if forgets:
        a[:, 20:110] *= a.dtype.type(2.0**-5)
    if reverse:
        a, g = a[:, ::-1].copy(), g[:, ::-1].copy()
    for reset in (None, np.arange(700)[:, None] % 300 == 280):
        operands = {"a": a, "g": g, "gstate": gstate, "reach": np.float32(not forgets)}
        if reset is not None:
            operands["reset"] = reset[None]
        recurrence = Recurrence(1, 700, reverse, True, np.dtype(state))

        def f(operands, recurrence=recurrence):
            dtype = recurrence.state
            params = {"recurrence": recurrence, "prefixes": prefixes, "dtype": dtype}
            return _sequence._bind(_sequence._BACK, operands, **params)[0]

        found = jax.jit(f)({name: jnp.asarray(x) for name, x in operands.items()})
        wide = None if reset is None else np.broadcast_to(reset[:, 0], shape[:2])
        h0 = np.zeros((2, 6), state)
        oracle = Oracle(a, np.zeros_like(g), h0, axis=1, reverse=reverse, reset=wide)
        expected = oracle.cotangents(g, gstate[:, 0])["h0"]
        check(np.asarray(found)[:, 0], expected)


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
        same_products(summary(a, np.zeros_like(a), (64,))[0], a)


@pytest.mark.gpu
def test_N1_products_of_subnormal_numbers_and_infinities():
    a = np.ones((1, 4096, 8), np.float32)
    a[0, 5, :] = [1e-42, 1e-42, 0, np.inf, np.inf, np.nan, 1e-30, 1e30]
    a[0, 9, :] = [1e38, 1, np.inf, 2, 0, 0, 1e-30, 1e30]
    product, _ = summary(a, np.zeros_like(a), (1024,))
    with np.errstate(invalid="ignore", over="ignore"):
        expected = (a[0, 5].astype(float) * a[0, 9]).astype(np.float32)
    np.testing.assert_allclose(product[0, 0], expected, rtol=1e-6, atol=1e-45)


@pytest.mark.gpu
def test_V3_summaries_are_the_same_every_time():
    shape = (1, 100_001, 64)
    a, b = (jnp.asarray(x) for x in (factors(shape, "float32"), inputs(shape, "float32")))
    f = jax.jit(partial(_summary.summary, recurrence_of(a, b), (1024, 8192)))
    first = [np.asarray(x) for x in f({"a": a, "b": b})]
    for _ in range(20):
        for x, y in zip(f({"a": a, "b": b}), first, strict=True):
            np.testing.assert_array_equal(x, y)
