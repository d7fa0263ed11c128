"""Values, tangents and gradients of single calls against the NumPy loops, element by element."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, LARGE, LENGTHS, SMALL, Arguments, Case, arguments, normal
from oracles import Expected, Oracle, check, same

from jax_scan import linear_scan


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@partial(jax.jit, static_argnames=("axis", "reverse", "out_dtype"))
def everything(inputs, dots, cts, reset, axis, reverse, out_dtype=None):
    """(h, state), their tangents, and the gradients."""

    def f(inputs):
        return linear_scan(
            **inputs,
            axis=axis,
            reverse=reverse,
            reset=reset,
            return_state=True,
            out_dtype=out_dtype,
        )

    with jax.numpy_dtype_promotion("standard"):
        out, pull = jax.vjp(f, inputs)
        return out, jax.jvp(f, (inputs,), (dots,))[1], pull(cts)[0]


def check_everything(case: Case, given: Arguments, out_dtype: str | None = None) -> None:
    oracle = Oracle(
        given.a, given.b, given.h0, axis=case.axis, reverse=case.reverse, reset=given.reset,
        out_dtype=out_dtype and DTYPES[out_dtype],
    )  # fmt: skip
    rng = np.random.default_rng(1)
    inputs = {n: x for n, x in given._asdict().items() if x is not None and n != "reset"}
    dots = {n: normal(rng, x.shape, x.dtype.name) for n, x in inputs.items()}
    g = normal(rng, case.shape, oracle.dtype.name)
    gstate = normal(rng, case.step, oracle.state)
    out, dout, grads = everything(
        inputs, dots, (g, gstate), given.reset, axis=case.axis, reverse=case.reverse,
        out_dtype=out_dtype,
    )  # fmt: skip
    assert out[0].dtype == oracle.dtype
    assert out[1].dtype == oracle.state
    for what, actual, expected in zip(("h", "state"), out, oracle.values(), strict=True):
        check(actual, expected, what)
    tangents = oracle.tangents(*(dots.get(n) for n in ("a", "b", "h0")))
    for what, actual, expected in zip(("dh", "dstate"), dout, tangents, strict=True):
        check(actual, expected, what)
    for name, expected in oracle.cotangents(g, gstate).items():
        assert grads[name].dtype == inputs[name].dtype
        check(grads[name], expected, f"d{name}")


@named(SMALL)
def test_small(case):
    check_everything(case, arguments(case))


@pytest.mark.slow
@named(LARGE)
def test_I2_N2_large(case):
    check_everything(case, arguments(case))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_V2_G2_lengths(length, reverse):
    case = Case("", (2, length, 33), reverse=reverse, h0=(2, 33))
    check_everything(case, arguments(case, seed=length))


@pytest.mark.parametrize("inner", [1, 40])
def test_V2_every_length(inner):
    """One batched call holds a scan of every length, each ending in a reset that starts padding."""
    lengths = range(1, 131)
    case = Case("", (130, 130, inner), h0=(130, inner))
    given = arguments(case)
    padding = np.arange(130)[None] >= np.array(lengths)[:, None]
    check_everything(case, given._replace(reset=padding))
    for length in (1, 2, 3, 5, 7, 17, 30, 34, 64, 66, 96, 130):
        short = Case("", (2, length, inner), h0=(2, inner))
        check_everything(short, arguments(short))


DTYPE_CASES = (
    Case("odd", (2, 33, 3), h0=(2, 3)),
    Case("rows", (2, 257, 64), reverse=True, reset=(2, 257)),
    Case("time last, shared a", (4, 65), axis=-1, a=(65,), h0=(4,)),
)


@named(DTYPE_CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_N4_dtypes(dtype, case):
    check_everything(case, arguments(case, dtype))


@pytest.mark.slow
@named(
    [
        Case("several tiles", (2, 20480), axis=-1, h0=(2,)),
        Case("not in whole vectors, reversed", (3, 18001), axis=-1, reverse=True, reset=(18001,)),
        Case("a block, shared a", (5, 4096), axis=-1, a=(4096,), h0=(5,)),
        Case("a block less one", (5, 4095), axis=-1),
    ]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_N4_time_last(dtype, case):
    check_everything(case, arguments(case, dtype))


@pytest.mark.slow
@named(
    [
        Case("odd channels, long", (1, 32768, 5)),
        Case("odd rows of a vector less one", (3, 1000, 7), reverse=True),
        Case("a tile and one", (2, 513, 31), h0=(2, 31)),
        Case("wider than a warp by one", (5, 65, 129)),
    ]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_N4_sixteen_bit_shapes(dtype, case):
    check_everything(case, arguments(case, dtype))


@pytest.mark.gpu
@named(DTYPE_CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_N6_the_cpu_kernel_on_a_gpu_machine(dtype, case):
    """Both kernels keep within the same bounds of the same loop."""
    with jax.default_device(jax.devices("cpu")[0]):
        check_everything(case, arguments(case, dtype))


# With so many channels a kernel may sum da itself over what shares an a, where its warps fit.
SHARED = (
    Case("over channels", (16, 37, 256), a=(16, 37, 1), h0=(16, 256), reset=(16, 37)),
    Case("over some channels", (4, 37, 16, 64), axis=1, a=(4, 37, 16, 1), h0=(16, 64)),
    Case("over the batch", (32, 37, 256), a=(37, 256), h0=(256,), reset=(37,)),
    Case("over channels, odd numbers", (17, 37, 256), a=(17, 37, 1), reverse=True),
    Case("over channels, reversed", (3, 50, 1408), a=(3, 50, 1), reverse=True),
    Case("over short runs of channels", (4, 19, 64, 16), axis=1, a=(4, 19, 64, 1)),
    Case("over odd runs of channels", (2, 70, 11, 23), axis=1, a=(2, 70, 11, 1), h0=(11, 1)),
    Case("over every so many channels", (2, 70, 11, 23), axis=1, a=(2, 70, 1, 23), reverse=True),
    Case("over few channels, many steps", (1, 4100, 32), a=(1, 4100, 1), h0=(32,)),
    Case("over odd channels", (17, 20, 255), a=(17, 20, 1)),
    Case("over the batch, reversed", (24, 50, 352), a=(1, 50, 352), reverse=True),
    Case("over some of the batch", (2, 64, 19, 64), a=(2, 1, 19, 64), h0=(1, 1)),
    Case("over a batch of twelve", (12, 1, 37, 704), a=(37, 704), reset=(12, 1, 37)),
    Case("over a large batch", (128, 21, 256), a=(21, 256)),
    Case("over the batch, few steps", (64, 5, 128), a=(5, 128)),
    Case("over the batch, many steps", (64, 700, 128), a=(700, 128), reverse=True),
    Case("over an odd batch", (33, 20, 256), a=(20, 256)),
    Case("over the batch, odd channels", (32, 20, 260), a=(20, 260)),
    Case("over batch and channels", (40, 33, 128), a=(33, 1), h0=(40, 128)),
    Case("over batch and time", (32, 33, 128), a=(128,)),
    Case("over batch, time last", (64, 64, 33), axis=-1, a=(64, 33)),
)


@named(SHARED)
def test_sums_of_the_gradient_of_shared_factors(case):
    check_everything(case, arguments(case))


@pytest.mark.parametrize("shape", [(64, 301, 1), (301, 128)])
def test_sums_of_the_gradient_of_shared_factors_have_the_same_bits_again(shape):
    a, b, *_ = arguments(Case("", (64, 301, 128), a=shape))
    gradient = jax.jit(jax.grad(lambda a, b: jnp.sum(jnp.sin(linear_scan(a, b)))))
    first = np.asarray(gradient(a, b))
    for _ in range(10):
        np.testing.assert_array_equal(gradient(a, b), first)


@named(SHARED[:4])
@pytest.mark.parametrize("dtype", [t for t in DTYPES if t != "float32"])
def test_sums_of_the_gradient_of_shared_factors_in_every_dtype(dtype, case):
    check_everything(case, arguments(case, dtype))


@named(SHARED[:3])
@pytest.mark.parametrize(("a", "b"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_sums_of_the_gradient_of_shared_factors_in_mixed_dtypes(a, b, case):
    check_everything(case, arguments(case, a, b))


MIXED = [
    ("float32", "bfloat16", None),
    ("bfloat16", "float32", None),
    ("float32", "float16", "float16"),
    ("float32", "complex64", None),
    ("complex64", "float32", None),
    ("float64", "float32", "float32"),
    ("float32", "float32", "bfloat16"),
    ("bfloat16", "bfloat16", "float32"),
    ("float64", "complex64", None),
    ("float32", "float32", "complex64"),
    ("bfloat16", "complex128", "complex64"),
]


@pytest.mark.parametrize(("a", "b", "out"), MIXED)
def test_N5_mixed_dtypes(a, b, out):
    for case in DTYPE_CASES[:1]:
        check_everything(
            case, arguments(case, a, b), out or np.result_type(DTYPES[a], DTYPES[b]).name
        )


def test_V1_reverse_by_hand():
    a, b = np.array([2.0, 3, 5]).reshape(1, 3, 1), np.array([1.0, 10, 100]).reshape(1, 3, 1)
    h = linear_scan(a, b, reverse=True)
    np.testing.assert_array_equal(np.ravel(h), [621, 310, 100])
    h = linear_scan(a, b, np.array([[7.0]]), reverse=True)
    np.testing.assert_array_equal(np.ravel(h), [691 + 2 * 3 * 5 * 7 - 70, 310 + 3 * 35, 135])


@pytest.mark.parametrize("h0", [None, (1, 1)])
def test_V1_reverse_where_all_factors_differ(h0):
    case = Case("", (1, 4, 1), reverse=True, h0=h0)
    check_everything(case, arguments(case))


def test_V3_shared_a_gradient_repeatable():
    case = Case("", (64, 300, 33), a=(33,))
    a, b, *_ = arguments(case)
    g = jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(linear_scan(a, b)))))
    first = np.asarray(g(a))
    assert all(np.array_equal(first, g(a)) for _ in range(20))


def test_V4_zero_factors_and_resets_isolate_segments():
    case = Case("", (1, 12, 2))
    a, b, *_ = arguments(case)
    reset = np.zeros(12, bool)
    reset[[5, 9]] = True
    a_zero = np.where(reset[:, None], np.float32(0), a)
    whole = linear_scan(a, b, reset=reset)
    same(whole, linear_scan(a_zero, b))

    @partial(jax.jit, static_argnames=("begin", "end"))
    def grad(a, b, reset, begin=0, end=None):
        def loss(a, b):
            return jnp.sum(linear_scan(a, b, reset=reset)[:, begin:end])

        return jax.grad(loss, (0, 1))(a, b)

    for begin, end in itertools.pairwise((0, 5, 9, 12)):
        segment = a[:, begin:end], b[:, begin:end]
        same(whole[:, begin:end], linear_scan(*segment))
        alone = grad(*segment, None)
        for factors, mask in ((a, reset), (a_zero, None)):
            for actual, inside in zip(grad(factors, b, mask, begin, end), alone, strict=True):
                actual = np.array(actual)
                # A factor that is zero, unlike one that is not read, does have a gradient.
                first = 1 if mask is None and begin else 0
                same(actual[:, begin + first : end], inside[:, first:])
                actual[:, begin:end] = 0
                assert not actual.any()


def test_V5_no_h0_is_zeros_and_steps_carry_the_state():
    case = Case("", (2, 5, 3), h0=(2, 3))
    a, b, h0, _ = arguments(case)
    same(linear_scan(a, b), linear_scan(a, b, np.zeros_like(h0)))
    whole, last = linear_scan(a, b, h0, return_state=True)
    state = h0
    for t in range(5):
        h, state = linear_scan(a[:, t : t + 1], b[:, t : t + 1], state, return_state=True)
        same(h[:, 0], whole[:, t])
    same(state, last)


def test_N1_exact_zeros():
    case = Case("", (1, 4, 1), h0=(1, 1))
    given = arguments(case)
    for factors in ([3, 0, 0.5, 2], [0, 0, 0, 0]):
        check_everything(case, given._replace(a=np.array(factors, np.float32).reshape(1, 4, 1)))


def test_N2_strong_decay():
    case = Case("", (2, 256, 3), h0=(2, 3))
    given = arguments(case)
    check_everything(case, given._replace(a=np.full(case.shape, 1e-30, np.float32)))


def test_N2_factors_below_one_over_an_odd_length():
    case = Case("", (1, 43884, 64))
    a, b, *_ = arguments(case)
    a = np.random.default_rng(2).uniform(size=a.shape).astype(a.dtype)
    h = np.asarray(linear_scan(a, b))
    assert np.isfinite(h).all()
    check(h, Oracle(a, b).values()[0])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [65, 100, 1000, 1025, 4097])
def test_G2_factors_far_from_one(length, reverse):
    """Padding that was no identity, or a factor of a neighbour's, would show at the ends."""
    case = Case("", (1, length, 3), reverse=reverse, h0=(1, 3))
    given = arguments(case)
    factors = np.random.default_rng(3).uniform(0.1, 0.5, case.shape).astype(np.float32)
    check_everything(case, given._replace(a=factors))


def test_G1_random_cotangents_equal_the_adjoint_loop():
    case = Case("", (1, 5, 1))
    given = arguments(case, "float64")
    factors = np.random.default_rng(4).uniform(size=case.shape)
    check_everything(case, given._replace(a=factors))


def test_N3_sixteen_bit_data_has_a_wide_state():
    """A state that was rounded to bfloat16 at any step, tile or chunk would be off by far more."""
    case = Case("", (2, 4096, 8))
    a, b, *_ = arguments(case, "bfloat16")
    slow = np.full(case.shape, 0.9961, a.dtype)
    h, state = linear_scan(slow, np.abs(b), return_state=True)
    oracle = Oracle(slow, np.abs(b))
    for actual, expected in zip((h, state), oracle.values(), strict=True):
        check(actual, expected)
        assert expected.bound.max() < 1e-3 * np.abs(expected.value).max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_N3_subnormal_data(dtype):
    """Flushed to zero they would be lost: the smallest normal float16 is 6e-5."""
    case = Case("", (2, 40, 16))
    a, b, *_ = arguments(case, dtype)
    b = (b * np.asarray(1e-5 if dtype == "float16" else 1, b.dtype)).astype(b.dtype)
    for x, y in ((a, b), (b, b)):
        h = linear_scan(x, y, out_dtype=np.float32)
        check(h, Oracle(x, y, out_dtype=np.float32).values()[0])


def test_N5_decay_near_one_is_not_rounded():
    b = np.full((1, 4096, 2), 1, DTYPES["bfloat16"])
    with jax.numpy_dtype_promotion("standard"):
        for a in (np.full((2,), 0.9999, np.float32), 0.9999, jnp.full((2,), 0.9999)):
            h, state = linear_scan(a, b, return_state=True, out_dtype=b.dtype)
            assert h.dtype == b.dtype
            np.testing.assert_allclose(state, 1e4 * (1 - 0.9999**4096), rtol=1e-3)


def test_N6_drift_over_a_long_scan():
    case = Case("", (1, 100_000, 2))
    _, b, *_ = arguments(case)
    a = np.full((2,), 0.9999, np.float32)
    oracle = Oracle(a, b)
    h = np.asarray(linear_scan(a, b))
    check(h, oracle.values()[0])
    assert (
        np.abs(h - oracle.values()[0].value).max() < 2e-5 * np.abs(oracle.values()[0].value).max()
    )


# Factors whose product overflows or has no meaning although no state does.
PATTERNS = {
    "huge factors while the state is zero": ([1e30, 1e30, 1e30, 0.5], [0, 0, 0, 0]),
    "an overflowing product meets a zero": ([1e30, 1e30, 0.0, 0.0], [0, 0, 1, 0]),
    "up and down": ([1e30, 1e30, 1e-30, 1e-30], [1e-30, 0, 1e-6, 1e-30]),
}


@pytest.mark.parametrize("channels", [1, 40])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_overflowing_products(pattern, channels):
    factors, terms = PATTERNS[pattern]
    length = 4096
    a = np.tile(np.array(factors, np.float32), length // 4)
    b = np.tile(np.array(terms, np.float32), length // 4)
    a = np.repeat(a[:, None], channels, 1)
    b = np.repeat(b[:, None], channels, 1)
    rng = np.random.default_rng(0)
    # A tail of ordinary steps reads what came out.
    a[-1000:], b[-1000:] = rng.uniform(0.5, 1, (1000, channels)), rng.normal(size=(1000, channels))
    h0 = np.full(channels, 1e-30 if pattern == "up and down" else 0, np.float32)
    oracle = Oracle(a, b, h0)
    values = oracle.values()
    assert np.isfinite(values[0].value).all()
    assert np.abs(values[0].value).max() < 1e38
    # Products below the smallest normal number may count as zero.
    for actual, expected in zip(linear_scan(a, b, h0, return_state=True), values, strict=True):
        check(actual, Expected(expected.value, expected.bound + 1e-30))


def test_overflowing_complex_products():
    """The product of the first two of three factors is inf - inf; no state comes near to that.

    The three stand at all places of a tile and of its segments.
    """
    length, channels = 4096, 256
    a, b = np.ones((2, length, channels), np.complex64)
    b[0], b[1:] = 2.0**-60, 0
    for c in range(channels):
        a[15 * c + 1 : 15 * c + 4, c] = 2.0**39 * (1 + 1j), 2.0**100 * (1 + 1j), 2.0**-120
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isnan(a.prod(0)).any()
    state, h = np.zeros(channels, np.complex128), np.empty(b.shape, np.complex128)
    for t in range(length):
        h[t] = state = a[t] * state + b[t]
    assert np.abs(h).max() < 2.0**90
    np.testing.assert_allclose(linear_scan(a, b), h, rtol=1e-5)


# Where time is divided, what overflows within a part must not be lost between two of them.
DIVIDED = (
    Case("one channel", (1, 512, 1)),
    Case("one channel, long", (1, 16384, 1)),
    Case("few channels", (1, 8192, 16)),
    Case("odd channels", (1, 4999, 5)),
    Case("many channels", (2, 1100, 64)),
    Case("time last", (3, 6000), axis=-1),
    Case("time last, many channels", (260, 700), axis=-1),
)


def places(length, channels):
    """Steps for several times as many channels: beside powers of two, near the ends, and others."""
    rng = np.random.default_rng(0)
    edges = (2 ** np.arange(3, 14)[:, None] + np.arange(-3, 2)).ravel()
    steps = [*edges[edges < length - 2], 1, length - 3, length // 2, length // 3]
    steps = [*steps, *rng.integers(1, length - 2, 3 * channels)]
    return np.resize(rng.permutation(steps), -(-max(40, 3 * channels) // channels) * channels)


def from_columns(x, case):
    """From (time, channels) in the order of the recurrence, and back."""
    x = x.reshape(-1, *case.step)
    return np.moveaxis(x[::-1] if case.reverse else x, 0, case.axis)


def to_columns(x, case):
    x = np.moveaxis(np.asarray(x), case.axis, 0)
    return (x[::-1] if case.reverse else x).reshape(len(x), -1)


@partial(jax.jit, static_argnames=("axis", "reverse"))
def cotangents(a, b, g, axis, reverse):
    """Of a and b together, and of b alone."""
    scan = partial(linear_scan, axis=axis, reverse=reverse)
    return *jax.vjp(scan, a, b)[1](g), *jax.vjp(lambda b: scan(a, b), b)[1](g)


@pytest.mark.parametrize("reverse", [False, True])
@named(DIVIDED)
@pytest.mark.parametrize(
    ("dtype", "entering", "large", "small"),
    [
        ("float32", 79, 39, -60),
        ("bfloat16", 80, 40, -60),
        ("float64", 672, 300, -400),
        ("complex64", 79, 39, -60),
    ],
)
def test_a_sum_that_overflows_stays_infinite(case, reverse, dtype, entering, large, small):
    """u = g + v, where v comes from later steps: both are finite, and a tiny factor follows."""
    case = case._replace(reverse=reverse)
    state = "float32" if dtype == "bfloat16" else dtype
    length, channels = to_columns(np.empty(case.shape), case).shape
    t = places(length, channels)
    every = np.arange(len(t))
    a, g = np.ones((length, len(t)), state), np.zeros((length, len(t)), state)
    a[t + 1, every], a[t, every] = 2.0**large, 2.0**small
    g[-1], g[t, every] = 2.0**entering, float(ml_dtypes.finfo(DTYPES[dtype]).max)
    u, v = np.empty_like(g), np.zeros(len(t), state)
    with np.errstate(over="ignore", invalid="ignore"):
        for k in reversed(range(length)):
            u[k] = g[k] + v
            v = a[k] * u[k]
    np.testing.assert_array_equal(np.isfinite(u), np.arange(length)[:, None] > t)

    for one in np.split(every, len(t) // channels):
        inputs = (from_columns(x[:, one], case).astype(DTYPES[dtype]) for x in (a, a**0, g))
        grads = cotangents(*inputs, axis=case.axis, reverse=reverse)
        da, *dbs = (to_columns(x, case).astype(state) for x in grads)
        np.testing.assert_array_equal(np.isfinite(da[1:]), np.isfinite(u[1:, one]))
        for db in dbs:
            if state == "complex64":  # which part of what is not finite is a NaN may differ
                np.testing.assert_array_equal(np.isfinite(db), np.isfinite(u[:, one]))
                db[~np.isfinite(db)] = u[:, one][~np.isfinite(db)]
            np.testing.assert_array_equal(db, u[:, one])


@partial(jax.jit, static_argnames=("axis", "reverse"))
def value_and_tangent(a, b, axis, reverse):
    return jax.jvp(lambda b: linear_scan(a, b, axis=axis, reverse=reverse), (b,), (b,))


@pytest.mark.parametrize("reverse", [False, True])
@named(DIVIDED)
def test_a_product_that_overflows_stays_infinite(case, reverse):
    """a h is just beyond the largest number, and b the negative of that number.

    Loops that fuse product and sum keep a finite number and others an infinite one. Either way, all
    later steps do too.
    """
    case = case._replace(reverse=reverse)
    length, channels = to_columns(np.empty(case.shape), case).shape
    t = places(length, channels)
    every = np.arange(len(t))
    largest = float(np.finfo(np.float32).max)
    a, b = np.ones((length, len(t)), np.float32), np.zeros((length, len(t)), np.float32)
    b[0] = 2.0**79
    a[t, every], b[t, every] = 2.0**9, largest * 2.0**-30
    a[t + 1, every], b[t + 1, every] = 2.0**30, -largest
    for one in np.split(every, len(t) // channels):
        inputs = (from_columns(x[:, one], case) for x in (a, b))
        for h in value_and_tangent(*inputs, axis=case.axis, reverse=reverse):
            h = to_columns(h, case)
            after = h[t[one] + 1, np.arange(channels)]
            assert (after > 2.0**117).all()
            expected = np.where(np.arange(length)[:, None] > t[one], after, 0)
            np.testing.assert_allclose(np.where(h > 2.0**117, h, 0), expected, rtol=1e-3)


# As cuda/resident.cuh divides time on 132 multiprocessors: into pieces, of which a lane takes some.
@pytest.mark.parametrize(
    ("length", "channels", "piece", "share"),
    [(131072, 16, 1014, 5), (131072, 8, 1000, 4), (65536, 16, 500, 7)],
)
def test_factors_that_overflow_between_pieces_of_time(length, channels, piece, share):
    """A state, and factors that are large at the ends of three pieces, then small."""
    a = np.ones(length, np.float32)
    third = (share + 2) * piece - 1
    for end in (share * piece, (share + 1) * piece, third):
        a[end - 19 : end] = 2
    a[third] = 2.0**-38
    expected = np.empty(length, np.float32)
    state = np.float32(2.0**75)
    with np.errstate(over="ignore"):
        for t in range(length):
            expected[t] = state = a[t] * state
    assert np.isinf(expected[-1])

    shape = (1, length, channels)
    factors = np.broadcast_to(a[None, :, None], shape).copy()
    h0 = np.full((1, channels), 2.0**75, np.float32)
    h = jax.jit(linear_scan)(factors, np.zeros(shape, np.float32), h0)
    np.testing.assert_array_equal(h, np.broadcast_to(expected[None, :, None], shape))


@pytest.mark.parametrize("length", [5, 3000])
def test_first_factor_is_not_read(length):
    case = Case("", (2, length, 3))
    a, b, *_ = arguments(case)
    rng = np.random.default_rng(1)
    g = normal(rng, case.shape, "float32")

    @jax.jit
    def run(a):
        h, pull = jax.vjp(linear_scan, a, b)
        dots = jax.jvp(linear_scan, (a, b), (g, g))[1]
        return h, dots, *pull(g)

    expected = run(a)
    for bad in (np.inf, -np.inf, np.nan):
        spoilt = a.copy()
        spoilt[:, 0] = bad
        for x, y in zip(run(spoilt), expected, strict=True):
            same(x, y)


def test_reset_stops_infinities_and_nans():
    case = Case("", (2, 40, 3), h0=(2, 3), reset=(40,))
    a, b, h0, _ = arguments(case)
    reset = np.arange(40) == 20
    for bad in (np.inf, np.nan):
        b_bad, a_bad = b.copy(), a.copy()
        b_bad[:, 7] = bad
        a_bad[:, 20] = bad
        h = linear_scan(a_bad, b_bad, h0, reset=reset)
        assert not np.isfinite(h[:, 7:20]).any()
        same(h[:, 20:], linear_scan(a, b, h0, reset=reset)[:, 20:])
        grads = jax.grad(lambda *x: jnp.sum(linear_scan(*x, reset=reset)[:, 20:]), (0, 1, 2))(
            a_bad, b_bad, h0
        )
        # The factors of the poisoned segment do multiply a state that is not finite: 0 times NaN.
        assert all(np.isfinite(g).all() for g in (grads[0][:, 20:], *grads[1:]))
        assert not grads[0][:, 20].any()
        assert not grads[1][:, :20].any()
        assert not grads[2].any()


def test_nan_stays_in_its_channel_and_spreads_forward_only():
    case = Case("", (2, 700, 33))
    a, b, *_ = arguments(case)
    clean = linear_scan(a, b)
    b[1, 300, 5] = np.nan
    h = np.array(linear_scan(a, b))
    assert np.isnan(h[1, 300:, 5]).all()
    h[1, 300:, 5] = clean[1, 300:, 5]
    same(h, clean)


def test_E2_tiny():
    for length in range(1, 9):
        case = Case("", (1, length, 1))
        check_everything(case, arguments(case))


def surrounded(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers at a boundary at which JAX reads NumPy's memory in place, with NaNs around them."""
    size = int(np.prod(shape))
    around = np.full(size + 160, np.nan, np.float32)
    start = 64 + -(around.ctypes.data // 4) % 16
    inside = around[start : start + size].reshape(shape)
    inside[:] = rng.uniform(0.1, 1, shape)
    return inside


@pytest.mark.parametrize("length", [31, 33, 63, 65, 127, 129, 1023, 1025, 4095, 4097])
@pytest.mark.parametrize("channels", [1, 3])
def test_E2_nan_around_the_buffers(length, channels):
    """Nothing before or after an operand reaches a result. On a GPU, see test_torch.py."""
    rng = np.random.default_rng(0)
    a, b, g = (surrounded(rng, (1, length, channels)) for _ in range(3))
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = [jax.dlpack.from_dlpack(x) for x in (a, b, g)]
        assert [x.unsafe_buffer_pointer() for x in arrays] == [x.ctypes.data for x in (a, b, g)]
        h, pull = jax.vjp(linear_scan, *arrays[:2])
        da, db = pull(arrays[2])
    oracle = Oracle(a, b)
    check(h, oracle.values()[0])
    expected = oracle.cotangents(g)
    check(da, expected["a"])
    check(db, expected["b"])


def test_E2_offset_buffers():
    """A slice of a larger NumPy array has an address that is aligned to one element only."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 1 + 33 * 3)).astype(np.float32)[:, 1:].reshape(2, 33, 3)
    check(linear_scan(a, b), Oracle(a, b).values()[0])


def test_G4_gradients_are_fully_written():
    """Outputs of one call land in memory that another has filled with NaN."""
    case = Case("", (3, 1000, 7), h0=(3, 7))
    a, b, h0, _ = arguments(case)
    grad = jax.jit(jax.grad(lambda *x: jnp.sum(jnp.cos(linear_scan(*x))), (0, 1, 2)))
    jax.block_until_ready(grad(a, b, h0))
    for _ in range(3):
        poison = [jnp.full(case.shape, jnp.nan, jnp.float32) for _ in range(8)]
        jax.block_until_ready(poison)
        del poison
        assert all(np.isfinite(g).all() for g in grad(a, b, h0))


# Channels for every multiprocessor of a large GPU, whose rows lie in 16-byte pieces, (B, L, D):
# short times, times that fill no box of 8 or 16 steps, rows that fill no strip.
WHOLE_ROWS = [
    Case("whole rows", (60, 47, 64), h0=(60, 64)),
    Case("whole rows, one step", (61, 1, 64), h0=(61, 64)),
    Case("whole rows, reverse", (1, 33, 8200), reverse=True),
    Case("whole rows, two turns", (270, 16, 72), h0=(270, 72), reverse=True),
    Case("whole rows, several strips", (4, 100, 1088)),
    Case("whole rows, wide", (130, 19, 264), h0=(130, 264)),
]


@pytest.mark.slow
@named(WHOLE_ROWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64", "mixed"])
def test_E2_whole_rows(case, dtype):
    given = arguments(case, "bfloat16" if dtype == "mixed" else dtype)
    if dtype == "mixed":
        given = given._replace(a=given.a.astype(np.float32))
    check_everything(case, given)
