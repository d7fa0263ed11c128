"""Scans whose time axis is split over devices, against loops and `lax.scan` on one device."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments
from devices import calls, collectives, mesh, put
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import Expected, Oracle, check, same, state_dtype
from programs import lax_scan

from jax_scan import _primitives, _sequence, _summary, linear_scan, sequence_parallel_scan
from jax_scan._reference import Recurrence

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

# Each case, how b is split, and over what.
CASES = {
    "batch and time": (Case("", (4, 24, 6), h0=(4, 6)), P("x", "t"), {"x": 2, "t": 4}),
    "time alone": (Case("", (3, 24, 5), reset=(3, 24)), P(None, "t"), {"t": 8}),
    "reversed": (
        Case("", (2, 24, 6), reverse=True, h0=(6,), reset=(24,)),
        P("x", "t"),
        {"x": 2, "t": 4},
    ),
    "reversed without h0": (
        Case("", (2, 24, 6), reverse=True),
        P(None, "t", "x"),
        {"t": 4, "x": 2},
    ),
    "time first": (Case("", (24, 4, 3), axis=0, h0=(4, 3)), P("t", "x"), {"x": 2, "t": 4}),
    "time last": (Case("", (4, 24), axis=-1, h0=(1,)), P("x", "t"), {"x": 2, "t": 4}),
    "rank 1": (Case("", (24,), axis=-1, h0=()), P("t"), {"t": 8}),
    "over two axes": (Case("", (2, 24, 3), h0=(2, 3)), P(None, ("t", "x")), {"x": 2, "t": 4}),
    "three devices": (Case("", (2, 12, 3), h0=(2, 3), reset=(12,)), P(None, "t"), {"t": 3}),
    "one step each": (Case("", (2, 8, 3), h0=(2, 3)), P(None, "t"), {"t": 8}),
    "one device": (Case("", (2, 8, 3), h0=(2, 3)), P(None, "t"), {"t": 1}),
    "a shared over batch and time": (Case("", (4, 24, 6), a=(6,)), P("x", "t"), {"x": 2, "t": 4}),
    "a shared over batch and channels": (
        Case("", (4, 24, 6), a=(24, 1), h0=(4, 1)),
        P("x", "t"),
        {"x": 2, "t": 4},
    ),
    "a one number": (Case("", (4, 24, 6), a=(), reset=(1, 24)), P("x", "t"), {"x": 2, "t": 4}),
    "resets at every step": (Case("", (2, 8, 4), reset=(2, 1)), P("x", "t"), {"x": 2, "t": 4}),
}
DTYPES = ["float32", "float64", "bfloat16", "float16", "complex64"]


def pieces(spec, rank, axis):
    spec = (*spec, *[None] * (rank - len(spec)))
    return spec, (*spec[:axis], *spec[axis + 1 :])


def fit_spec(spec, shape, full):
    """The trailing axes of spec, for an operand that may have size 1 in them."""
    lead = len(spec) - len(shape)
    return P(
        *(s if n == m else None for s, n, m in zip(spec[lead:], shape, full[lead:], strict=True))
    )


def given_on(over, case, spec, given):
    a, b, h0, reset = given
    axis = case.axis % b.ndim
    whole, step = pieces(spec, b.ndim, axis)
    specs = [
        fit_spec(whole, a.shape, b.shape),
        P(*whole),
        None if h0 is None else fit_spec(step, h0.shape, case.step),
        None if reset is None else fit_spec(whole[: axis + 1], reset.shape, b.shape[: axis + 1]),
    ]
    return specs, [
        None if x is None else put(x, over, s) for x, s in zip(given, specs, strict=True)
    ]


def whole_scan(case, spec, over):
    """The function of whole arrays."""

    def f(a, b, h0, reset):
        return sequence_parallel_scan(
            a,
            b,
            h0,
            sharding=NamedSharding(over, spec),
            axis=case.axis,
            reverse=case.reverse,
            reset=reset,
            return_state=True,
        )

    return f


def shard_scan(case, spec, over, specs, check_vma=True):
    """The same inside `jax.shard_map`."""
    axis = case.axis % len(case.shape)
    whole, step = pieces(spec, len(case.shape), axis)

    def f(a, b, h0, reset):
        return sequence_parallel_scan(
            a,
            b,
            h0,
            axis_name=whole[axis],
            axis=case.axis,
            reverse=case.reverse,
            reset=reset,
            return_state=True,
        )

    return jax.shard_map(
        f, mesh=over, in_specs=tuple(specs), out_specs=(P(*whole), P(*step)), check_vma=check_vma
    )


def oracle_of(case, given):
    a, b, h0, reset = given
    return Oracle(a, b, h0, axis=case.axis, reverse=case.reverse, reset=reset)


def everything(f):
    """Value, tangents in all operands, cotangents of all."""

    def run(primals, reset, dots, cts):
        def g(a, b, h0=None):
            return f(a, b, h0, reset)

        out, pull = jax.vjp(g, *primals)
        return out, jax.jvp(g, primals, dots)[1], pull(cts)

    return run


@pytest.fixture
def exchange(request, monkeypatch):
    """Either way to exchange the maps, whatever the number of devices."""
    monkeypatch.setattr(_sequence, "_GATHERED", 16 if request.param == "gathered" else 0)
    _sequence._mapped.cache_clear()
    yield
    _sequence._mapped.cache_clear()


FORMS = (
    [(name, "whole", "gathered") for name in CASES]
    + [
        (name, form, "gathered")
        for name in ("batch and time", "reversed", "over two axes", "a shared over batch and time")
        for form in ("explicit", "shard_map", "shard_map unchecked")
    ]
    + [
        ("batch and time", "explicit", "doubled"),
        ("time alone", "shard_map", "doubled"),
        ("reversed", "whole", "doubled"),
        ("reversed without h0", "shard_map unchecked", "doubled"),
        ("over two axes", "whole", "doubled"),
        ("three devices", "whole", "doubled"),
        ("one device", "whole", "doubled"),
        ("a one number", "shard_map", "doubled"),
    ]
)


@pytest.mark.parametrize(("name", "form", "exchange"), FORMS, indirect=["exchange"])
@pytest.mark.usefixtures("exchange")
def test_S3_values_tangents_and_gradients(name, form):
    case, spec, sizes = CASES[name]
    over = mesh(EXPLICIT if form == "explicit" else AUTO, **sizes)
    given = arguments(case)
    dots, cts = arguments(case, seed=1), arguments(case._replace(h0=case.step), seed=2)
    oracle = oracle_of(case, given)
    primals = [x is not None for x in given[:3]]
    with jax.set_mesh(over):
        specs, args = given_on(over, case, spec, given)
        _, tangents = given_on(over, case, spec, dots)
        _, (_, g, gstate, _) = given_on(over, case._replace(h0=case.step), spec, cts)
        if form.startswith("shard_map"):
            f = shard_scan(case, spec, over, specs, check_vma=form == "shard_map")
        else:
            f = whole_scan(case, spec, over)
        some = [
            tuple(x for x, is_there in zip(xs, primals, strict=False) if is_there)
            for xs in (args, tangents)
        ]
        out, dout, gradients = jax.jit(everything(f))(some[0], args[3], some[1], (g, gstate))
        assert out[0].sharding.is_equivalent_to(args[1].sharding, args[1].ndim)
        assert gradients[1].sharding.is_equivalent_to(args[1].sharding, args[1].ndim)
    for x, expected in zip(out, oracle.values(), strict=True):
        check(x, expected, "value")
    for x, expected in zip(dout, oracle.tangents(*dots[:3]), strict=True):
        check(x, expected, "tangent")
    expected = oracle.cotangents(cts.b, cts.h0)
    for x, name in zip(gradients, expected, strict=True):
        check(x, expected[name], f"gradient of {name}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_S3_dtypes(dtype):
    case, spec, sizes = CASES["batch and time"]
    over = mesh(**sizes)
    given, cts = arguments(case, dtype), arguments(case, dtype, seed=2)
    _, (a, b, h0, _) = given_on(over, case, spec, given)

    def f(a, b, h0, g):
        scan = partial(sequence_parallel_scan, sharding=NamedSharding(over, spec))
        h, pull = jax.vjp(scan, a, b, h0)
        return h, pull(g)

    h, gradients = jax.jit(f)(a, b, h0, put(cts.b, over, spec))
    oracle = oracle_of(case, given)
    assert h.dtype == given.b.dtype
    check(h, oracle.values()[0])
    for x, expected in zip(gradients, oracle.cotangents(cts.b).values(), strict=True):
        check(x, expected)


@pytest.mark.parametrize(
    ("reverse", "with_h0", "shared", "third", "exchange"),
    [
        (False, True, False, True, "gathered"),
        (True, False, False, False, "doubled"),
        (True, True, True, False, "doubled"),
    ],
    indirect=["exchange"],
)
@pytest.mark.usefixtures("exchange")
def test_S3_higher_derivatives(reverse, with_h0, shared, third):
    """Orders two and three, both modes, against `lax.scan` in float64 on one device."""
    case = Case("", (8, 2, 3), axis=0, h0=(2, 3), reset=(8,), a=(3,) if shared else None)
    a, b, h0, reset = arguments(case, "float64")
    over = mesh(x=2, t=4)
    ours = partial(
        sequence_parallel_scan, sharding=NamedSharding(over, P("t", "x")), axis=0, reverse=reverse
    )
    theirs = partial(lax_scan, axis=0, reverse=reverse)

    def derivatives(scan, reset):
        def loss(a, b, h0):
            return jnp.sum(jnp.sin(scan(a, b, h0 if with_h0 else None, reset=reset)))

        grad = jax.grad(loss, (0, 1, 2))

        def squares(*x):
            return sum(jnp.sum(y**2) for y in grad(*x))

        again = jax.grad(squares, (0, 1, 2))

        def every(*x):
            forward = jax.jvp(lambda *x: jax.jvp(loss, x, x)[1], x, x)[1]
            highest = jax.jvp(again, x, x)[1] if third else ()
            return jax.jvp(grad, x, x)[1], again(*x), forward, highest

        return jax.jit(every)

    actual = derivatives(ours, put(reset, over, P("t")))(
        put(a, over, P() if shared else P("t", "x")),
        put(b, over, P("t", "x")),
        put(h0, over, P("x")),
    )
    jax.tree.map(same, actual, derivatives(theirs, jnp.asarray(reset))(a, b, h0))


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_S3_vmap(axis_type):
    """A mapped axis before or after time; what is not mapped is the same for all."""
    over = mesh(axis_type, t=4)
    b = np.random.default_rng(0).normal(size=(3, 16, 5)).astype(np.float32)
    a = np.random.default_rng(1).uniform(0.5, 1, (16, 5)).astype(np.float32)
    oracle = Oracle(a, b)
    scan = partial(sequence_parallel_scan, sharding=NamedSharding(over, P("t")), axis=0)

    def f(a, b):
        h, pull = jax.vjp(jax.vmap(scan, in_axes=(None, 0)), a, b)
        return h, pull(b)

    with jax.set_mesh(over):
        h, (da, db) = jax.jit(f)(put(a, over, P("t")), put(b, over, P(None, "t")))
    check(h, oracle.values()[0])
    check(da, oracle.cotangents(b)["a"])
    check(db, oracle.cotangents(b)["b"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("exchange", ["gathered", "doubled"], indirect=True)
@pytest.mark.usefixtures("exchange")
def test_N3_sums_of_sixteen_bit_cotangents_are_wide(dtype):
    """b alone is mapped, so that the gradient of h0, in float32, is a sum of h's cotangents.

    That of float16 is beyond its largest number.
    """
    case = Case("", (64, 8, 3), a=(8, 3), h0=(3,))
    a, b, *_ = arguments(case, dtype)
    h0 = np.linspace(-1, 1, 3, dtype=np.float32)
    g = np.random.default_rng(1).uniform(1000, 3000, case.shape).astype(a.dtype)
    scan = partial(sequence_parallel_scan, sharding=NamedSharding(mesh(t=4), P("t")))
    scan = jax.vmap(scan, (None, 0, None))
    (actual,) = jax.jit(lambda h0: jax.vjp(lambda h0: scan(a, b, h0), h0)[1](g))(h0)
    check(actual, Oracle(a, b, h0).cotangents(g)["h0"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("exchange", ["gathered", "doubled"], indirect=True)
@pytest.mark.usefixtures("exchange")
def test_N3_sums_over_mapped_initial_states_are_wide(dtype):
    """h0 alone is mapped, so that the gradient of b, in float32, is a sum of h's cotangents."""
    case = Case("", (64, 8, 3), a=(8, 3), h0=(64, 3))
    a, b, h0, _ = arguments(case, dtype)
    b = b[0].astype(np.float32)
    g = np.random.default_rng(1).uniform(1000, 3000, case.shape).astype(a.dtype)
    scan = partial(
        sequence_parallel_scan, sharding=NamedSharding(mesh(t=4), P("t")), out_dtype=a.dtype
    )
    scan = jax.vmap(scan, (None, None, 0))
    (actual,) = jax.jit(lambda b: jax.vjp(lambda b: scan(a, b, h0), b)[1](g))(b)
    expected = Oracle(a, b, h0, shape=case.shape, out_dtype=a.dtype).cotangents(g)["b"]
    check(actual, expected)


def communication(length, function):
    over = mesh(x=2, t=4)
    spec = P("x", "t")
    scan = partial(sequence_parallel_scan, sharding=NamedSharding(over, spec))
    functions = {
        "value": scan,
        "state": partial(scan, return_state=True),
        "gradient": jax.grad(lambda *x: jnp.sum(jnp.sin(scan(*x))), (0, 1, 2)),
        "gradient without h0": jax.grad(lambda *x: jnp.sum(jnp.sin(scan(*x[:2]))), (0, 1)),
        "tangent": lambda *x: jax.jvp(scan, x, x),
        "second": jax.grad(
            lambda *x: jnp.sum(jax.grad(lambda *x: jnp.sum(jnp.sin(scan(*x))))(*x) ** 2), (0, 1, 2)
        ),
    }
    b, h0 = np.ones((4, length, 6), np.float32), np.ones((4, 6), np.float32)
    args = put(b, over, spec), put(b, over, spec), put(h0, over, P("x"))
    text = jax.jit(functions[function]).lower(*args).compile().as_text()
    return collectives(text), calls(text)


STEP = (2, 1, 6)  # of one device: half of the batch
PAIRS = ("all-gather", (4, 2, *STEP))
SUM = ("all-reduce", STEP)


@pytest.mark.parametrize(
    ("function", "expected", "kernels"),
    [
        ("value", [PAIRS], 3),
        ("state", [PAIRS, SUM], 3),
        # Besides the kernels of the value: the cotangent of the own summary, that of the scan over
        # shards, and the one that writes the gradients.
        ("gradient", [PAIRS, SUM, ("reduce-scatter", (1, *STEP))], 6),
        ("gradient without h0", [PAIRS, ("reduce-scatter", (1, *STEP))], 6),
        ("tangent", [("all-gather", (4, *STEP)), PAIRS], 6),
    ],
)
def test_S3_what_is_sent(function, expected, kernels):
    """One exchange of a pair per channel, one of a number for the gradient; whatever the length."""
    short, long = communication(16, function), communication(4096, function)
    assert short[0] == sorted(expected)
    assert long[0] == short[0]
    assert len(short[1]) == len(long[1]) == kernels


@pytest.mark.parametrize("exchange", ["doubled"], indirect=True)
@pytest.mark.usefixtures("exchange")
def test_S3_what_many_devices_send():
    """As often as the number of devices doubles, and once more for the state."""
    moved = [("collective-permute", STEP)] * 3
    for length in (16, 4096):
        assert communication(length, "value")[0] == sorted(
            [("collective-permute", (2, *STEP))] * 2 + moved[:1]
        )
        assert communication(length, "gradient without h0")[0] == sorted(
            [("collective-permute", (2, *STEP))] * 2 + moved[:1] + moved
        )


def test_S3_what_higher_derivatives_send_does_not_grow():
    short, long = communication(16, "second")[0], communication(4096, "second")[0]
    assert short == long
    assert max(np.prod(shape) for _, shape in short) <= 4 * 2 * np.prod(STEP)


def test_S3_a_call_is_compiled_once(monkeypatch):
    """Outside of `jax.jit` too: equal calls share one compiled function."""
    traced = []
    scan = _sequence._scan

    def counted(*args, **options):
        traced.append(args)
        return scan(*args, **options)

    monkeypatch.setattr(_sequence, "_scan", counted)
    over = mesh(t=4)
    b = np.ones((2, 20, 3), np.float32)
    for _ in range(2):
        x = put(b, over, P(None, "t"))
        h = sequence_parallel_scan(x, x, sharding=x.sharding)
        check(h, Oracle(b, b).values()[0])
    assert len(traced) == 1


def on_devices(a, b, h0=None, reset=None, count=4, **options):
    over = mesh(t=count)
    args = [put(x, over, P(None, "t")) for x in (a, b)]
    if h0 is not None:
        args.append(put(h0, over, P()))
    if reset is not None:
        options["reset"] = put(reset, over, P(None, "t"))
    return partial(
        sequence_parallel_scan, sharding=NamedSharding(over, P(None, "t")), **options
    ), args


@pytest.mark.parametrize("exchange", ["gathered", "doubled"], indirect=True)
@pytest.mark.usefixtures("exchange")
def test_N1_products_that_overflow():
    """Where the loop stays finite since its state is zero, so does the result."""
    rng = np.random.default_rng(0)
    a = np.full((1, 32, 3), 1e9, np.float32)
    b = np.zeros((1, 32, 3), np.float32)
    a[:, 24:] = 0.5
    b[:, 24:] = rng.normal(size=(1, 8, 3))
    scan, args = on_devices(a, b)
    h, pull = jax.vjp(jax.jit(scan), *args)
    check(h, Oracle(a, b).values()[0])
    # A gradient that stops at a reset does not meet the product either.
    reset = np.zeros((1, 32), bool)
    reset[:, 24] = True
    scan, args = on_devices(a, b, reset=reset)
    h, pull = jax.vjp(jax.jit(scan), *args)
    oracle = Oracle(a, b, reset=reset)
    check(h, oracle.values()[0])
    g = np.zeros_like(b)
    g[:, 24:] = 1
    for x, expected in zip(pull(jnp.asarray(g)), oracle.cotangents(g).values(), strict=True):
        check(x, expected)


@pytest.mark.parametrize("exchange", ["gathered", "doubled"], indirect=True)
@pytest.mark.usefixtures("exchange")
def test_N1_a_product_is_taken_in_the_order_of_the_steps():
    """Zeros first: what follows them can't overflow, in whatever direction time runs."""
    a = np.full((1, 32, 2), 1e20, np.float32)
    a[:, ::8] = 0
    b = np.zeros_like(a)
    h0 = np.ones((1, 2), np.float32)
    for reverse in (False, True):
        factors = a[:, ::-1] if reverse else a
        scan, args = on_devices(factors, b, h0, reverse=reverse, return_state=True)
        for x, expected in zip(
            scan(*args), Oracle(factors, b, h0, reverse=reverse).values(), strict=True
        ):
            check(x, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("exchange", ["gathered", "doubled"], indirect=True)
@pytest.mark.usefixtures("exchange")
def test_N1_what_is_not_finite_stays_behind_a_reset(value):
    a = np.full((1, 16, 2), 0.5, np.float32)
    b = np.ones_like(a)
    b[0, 5, 1] = value
    a[0, 9, 0] = value
    reset = np.zeros((1, 16), bool)
    reset[0, 9] = True
    scan, args = on_devices(a, b, reset=reset)
    h, pull = jax.vjp(jax.jit(scan), *args)
    oracle = Oracle(a, b, reset=reset)
    check(h, oracle.values()[0])
    g = np.zeros_like(b)
    g[:, 10:] = 1
    for x, expected in zip(pull(jnp.asarray(g)), oracle.cotangents(g).values(), strict=True):
        check(x[:, 9:], expected._replace(value=expected.value[:, 9:], bound=expected.bound[:, 9:]))


def test_G3_factors_that_are_zero():
    """Derivatives by a factor of zero are those of the loop: nothing divides by a."""
    case = Case("", (1, 16, 3), h0=(1, 3))
    a, b, h0, _ = arguments(case, "float64")
    a[:, ::3] = 0
    scan, args = on_devices(a, b, h0)
    g = np.random.default_rng(1).normal(size=b.shape)
    gradients = jax.vjp(jax.jit(scan), *args)[1](jnp.asarray(g))
    for x, expected in zip(gradients, Oracle(a, b, h0).cotangents(g).values(), strict=True):
        check(x, expected)


def test_E1_empty_batch():
    x = np.ones((0, 16, 3), np.float32)
    scan, args = on_devices(x, x, return_state=True)
    h, state = scan(*args)
    assert h.shape == x.shape
    assert state.shape == (0, 3)
    a, b = np.ones((1, 32768, 5), np.float32), np.ones((0, 32768, 5), np.float32)
    scan, args = on_devices(a, b, reset=np.zeros((0, 32768), bool))
    assert scan(*args).shape == b.shape

    x = np.ones((1, 32768, 0), np.float32)
    scan, args = on_devices(x, x)
    gradients = jax.grad(lambda *args: scan(*args).sum(), (0, 1))(*args)
    assert [g.shape for g in gradients] == [x.shape, x.shape]


def test_S3_long_scans():
    """Long enough for the paths of long scans on each device, with other axes left to XLA."""
    case = Case("", (2, 8192, 4), h0=(2, 4))
    given = arguments(case)
    over = mesh(t=4, x=2)
    _, (a, b, h0, _) = given_on(over, case, P("x", "t"), given)
    h = sequence_parallel_scan(a, b, h0, sharding=b.sharding)
    check(h, oracle_of(case, given).values()[0])


def test_S3_inside_a_shard_map_over_time_alone():
    """The other axes are left to XLA."""
    case = Case("", (4, 16, 6), h0=(4, 6))
    given = arguments(case)
    over = mesh(x=2, t=4)
    _, (a, b, h0, _) = given_on(over, case, P("x", "t"), given)
    f = jax.shard_map(
        partial(sequence_parallel_scan, axis_name="t"),
        mesh=over,
        in_specs=(P(None, "t"), P(None, "t"), P()),
        out_specs=P(None, "t"),
        axis_names={"t"},
    )
    g = np.random.default_rng(1).normal(size=case.shape).astype(np.float32)
    h, pull = jax.vjp(jax.jit(f), a, b, h0)
    oracle = oracle_of(case, given)
    check(h, oracle.values()[0])
    for x, expected in zip(pull(jnp.asarray(g)), oracle.cotangents(g).values(), strict=True):
        check(x, expected)


def test_S3_the_sharding_of_an_explicit_array():
    """What the error of `linear_scan` says to call."""
    over = mesh(EXPLICIT, x=2, t=4)
    a, b, _, _ = arguments(Case("", (4, 16, 6)))
    with jax.set_mesh(over):
        args = put(a, over, P("x", "t")), put(b, over, P("x", "t"))

        @jax.jit
        def f(a, b):
            return sequence_parallel_scan(a, b, sharding=jax.typeof(b).sharding)

        check(f(*args), Oracle(a, b).values()[0])


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_S3_arrays_that_are_sharded_otherwise_are_moved(axis_type):
    over = mesh(axis_type, x=2, t=4)
    case = Case("", (4, 16, 6), a=(16, 6), h0=(6,), reset=(16,))
    given = arguments(case)
    a, b, h0, reset = given
    oracle = oracle_of(case, given)
    split = NamedSharding(over, P("x", "t"))

    def f(a, b, h0, reset, g):
        scan = partial(sequence_parallel_scan, sharding=split, reset=reset)
        h, pull = jax.vjp(scan, a, b, h0)
        return h, pull(g)

    with jax.set_mesh(over):
        for spec in (P(), P("t"), P(None, ("x", "t"))):
            args = put(b, over, spec), put(h0, over, P("x")), put(reset, over, P())
            h, gradients = jax.jit(f)(put(a, over, P()), *args, jax.device_put(b, split))
            check(h, oracle.values()[0])
            for x, expected in zip(gradients, oracle.cotangents(b).values(), strict=True):
                check(x, expected)
    check(sequence_parallel_scan(a, b, sharding=split), Oracle(a, b).values()[0])


def test_checkpoint():
    case = Case("", (2, 16, 3), h0=(2, 3))
    a, b, h0, _ = arguments(case, "float64")
    scan, args = on_devices(a, b, h0)

    def loss(*x):
        return jnp.sum(jnp.sin(scan(*x)))

    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    jax.tree.map(same, jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*args), expected)


def test_the_last_state_alone():
    """The scan that writes no h, and its derivatives."""
    case = Case("", (2, 9, 3), h0=(2, 3))
    a, b, h0, _ = arguments(case, "float64")
    recurrence = Recurrence(1, 9, False, True, np.dtype(np.float64))
    oracle = Oracle(a, b, h0)

    def last(a, b, h0):
        return _primitives.last_state(recurrence, {"a": a, "b": b, "h0": h0[:, None]})[:, 0]

    args = tuple(map(jnp.asarray, (a, b, h0)))
    state, dstate = jax.jit(lambda *x: jax.jvp(last, x, x))(*args)
    check(state, oracle.values()[1])
    check(dstate, oracle.tangents(a, b, h0)[1])
    gradients = jax.vjp(last, *args)[1](jnp.asarray(h0))
    zeros = np.zeros_like(b)
    for x, expected in zip(gradients, oracle.cotangents(zeros, h0).values(), strict=True):
        check(x, expected)
    linear = jax.linear_transpose(lambda b: last(args[0], b, 0 * args[2]), args[1])
    check(linear(jnp.asarray(h0))[0], oracle.cotangents(zeros, h0)["b"])
    mapped = jax.vmap(last, in_axes=(0, 0, 0))(*(x[:, None] for x in args))
    check(mapped[:, 0], oracle.values()[1])
    text = jax.jit(last).lower(*args).as_text()
    assert 'results = "state' in text


def test_one_device_agrees_with_linear_scan_exactly():
    a, b, h0, _ = arguments(Case("", (2, 33, 5), h0=(2, 5)))
    scan, args = on_devices(a, b, h0, count=1)
    np.testing.assert_array_equal(scan(*args), linear_scan(a, b, h0))


# ---- What is forgotten within a device's steps ---------------------------------------------------

EACH = 384  # steps on each of three devices


@pytest.fixture
def short_prefixes(monkeypatch):
    """Devices look after 48, 96 and 192 steps whether they have forgotten."""
    monkeypatch.setattr(_sequence, "_PREFIX", 48)
    monkeypatch.setattr(_sequence, "_RATIO", 2)
    monkeypatch.setattr(_sequence, "_PARTS", 2)
    _sequence._mapped.cache_clear()
    yield
    _sequence._mapped.cache_clear()


def forgetting(dtype, at, reverse=False, channels=3, each=EACH):
    """Arguments over some devices, which forget in the 40 steps that start at `at` on each."""
    case = Case("", (2, len(at) * each, channels), h0=(2, channels), reverse=reverse)
    given = arguments(case, dtype)
    a = np.array(given.a)
    for device, start in enumerate(at):
        if start is not None:
            first = device * each + start
            a[:, first : first + 40] *= 2.0 ** (-28 if dtype == "float64" else -4)
    return case, given._replace(a=a[:, ::-1].copy() if reverse else a)


def reached(a, reset=None, reverse=False):
    """How far the state before each device's steps reaches there: an index into the prefixes."""
    over = mesh(t=3)
    recurrence = Recurrence(1, EACH, reverse, True, np.dtype(state_dtype(a.dtype)))

    def local(operands):
        prefixes = _sequence._prefixes(recurrence)
        return jnp.max(_summary.reach(recurrence, prefixes, operands))[None]

    f = jax.shard_map(local, mesh=over, in_specs=P(None, "t"), out_specs=P("t"))
    operands = {"a": a} if reset is None else {"a": a, "reset": reset[..., None]}
    found = jax.jit(f)({name: put(x, over, P(None, "t")) for name, x in operands.items()})
    return np.asarray(found).tolist()


@pytest.mark.parametrize("exchange", ["gathered", "doubled"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "at", "reaches", "reverse"),
    [
        ("float32", (5, 5, 52), [0, 0, 1], False),
        ("float32", (5, 110, None), [0, 2, 3], True),
        ("complex64", (None, 52, 8), [3, 1, 0], False),
        ("bfloat16", (110, 220, 52), [2, 3, 1], True),
    ],
)
@pytest.mark.usefixtures("short_prefixes", "exchange")
def test_S3_states_that_are_forgotten(dtype, at, reaches, reverse):
    """Each device decides by its own factors after how many steps."""
    case, given = forgetting(dtype, at, reverse)
    assert reached(given.a, reverse=reverse) == (reaches[::-1] if reverse else reaches)
    dots, cts = arguments(case, dtype, seed=1), arguments(case, dtype, seed=2)
    state = np.asarray(cts.h0, state_dtype(given.a.dtype))
    scan, args = on_devices(*given[:3], count=3, reverse=reverse, return_state=True)
    run = jax.jit(everything(lambda a, b, h0, _: scan(a, b, h0)))
    some = [tuple(map(jnp.asarray, x[:3])) for x in (dots, cts)]
    out, dout, gradients = run(tuple(args), None, some[0], (some[1][1], jnp.asarray(state)))
    oracle = oracle_of(case, given)
    for x, expected in zip(out, oracle.values(), strict=True):
        check(x, expected, "value")
    if dtype != "bfloat16":  # a tangent is the sum of two, each of which is rounded
        for x, expected in zip(dout, oracle.tangents(*dots[:3]), strict=True):
            check(x, expected, "tangent")
    expected = oracle.cotangents(cts.b, state)
    for x, name in zip(gradients, expected, strict=True):
        check(x, expected[name], f"gradient of {name}")


@pytest.mark.parametrize("start", [5, 2000])
@pytest.mark.parametrize("reverse", [False, True])
def test_S3_long_scans_over_two_devices(start, reverse):
    """Forgotten within the first 1024 steps, or not. On GPUs where there are two."""
    case, given = forgetting("float32", (None, start), reverse, each=8200)
    scan, args = on_devices(*given[:3], count=2, reverse=reverse)
    g = arguments(case, seed=2).b
    h, pull = jax.vjp(jax.jit(scan), *args)
    oracle = oracle_of(case, given)
    check(h, oracle.values()[0])
    gradients = pull(jax.device_put(g, h.sharding))
    for x, expected in zip(gradients, oracle.cotangents(g).values(), strict=True):
        check(x, expected)


@pytest.mark.usefixtures("short_prefixes")
def test_S3_states_that_end_at_resets():
    case, given = forgetting("float32", (None, None, None))
    reset = np.zeros((2, 3 * EACH), bool)
    reset[:, 20] = True
    reset[:, EACH + 60] = True
    reset[0, 2 * EACH + 3] = True  # of one batch entry: the other goes on
    assert reached(given.a, reset) == [0, 1, 3]
    case, given = case._replace(reset=reset.shape), given._replace(reset=reset)
    g = arguments(case, seed=2).b
    scan, args = on_devices(*given, count=3)
    h, pull = jax.vjp(jax.jit(scan), *args)
    oracle = oracle_of(case, given)
    check(h, oracle.values()[0])
    for x, expected in zip(pull(jnp.asarray(g)), oracle.cotangents(g).values(), strict=True):
        check(x, expected)


@pytest.mark.parametrize(("zeros", "reverse"), [(1, True), (2, False)])
@pytest.mark.usefixtures("short_prefixes")
def test_S3_higher_derivatives_of_states_that_are_forgotten(monkeypatch, zeros, reverse):
    """Factors of zero alone do not forget: without one of them the product is not zero."""
    monkeypatch.setattr(_summary, "_LEAST", 2.0**-28)
    case, (a, b, h0, _) = forgetting("float64", (None, 5, None), reverse, channels=2)
    first = 2 * EACH + 7
    at = 3 * EACH - first - zeros if reverse else first
    a[:, at : at + zeros] = 0
    assert reached(a, reverse=reverse) == [3, 0, 3]
    scan, args = on_devices(a, b, h0, count=3, reverse=reverse)
    theirs = partial(lax_scan, axis=case.axis, reverse=reverse)

    def derivatives(scan):
        def loss(a, b, h0):
            return jnp.sum(jnp.sin(scan(a, b, h0)))

        grad = jax.grad(loss, (0, 1, 2))

        def every(*x):
            squares = jax.grad(lambda *x: sum(jnp.sum(y**2) for y in grad(*x)), (0, 1, 2))
            forward = jax.jvp(lambda *x: jax.jvp(loss, x, x)[1], x, x)[1]
            return jax.jvp(grad, x, x)[1], squares(*x), forward

        return jax.jit(every)

    jax.tree.map(same, derivatives(scan)(*args), derivatives(theirs)(*map(jnp.asarray, (a, b, h0))))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.usefixtures("short_prefixes")
def test_N1_what_is_not_finite_passes_steps_that_do_not_forget(value):
    """Neither what enters a device's steps nor what they hold themselves, early or late, is lost.

    An infinity may become a NaN on the devices after its own.
    """
    for where in (EACH - 1, EACH + 3, EACH + 300):
        for name in ("a", "b"):
            case, given = forgetting("float32", (None, None, None))
            given = given._replace(a=np.copysign(0.9 + np.abs(given.a) / 10, given.a))
            getattr(given, name)[0, where, 1] = value
            scan, args = on_devices(*given[:3], count=3)
            h, expected = np.array(scan(*args)), oracle_of(case, given).values()[0]
            lost = np.isnan(h) & np.isinf(expected.value)
            assert not lost[:, : 2 * EACH].any()
            h[lost] = expected.value[lost]
            check(h, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.usefixtures("short_prefixes")
def test_N1_what_is_not_finite_does_not_pass_steps_that_forget(value):
    """On its own device h is what it is in a loop; on the others as if there had been zero."""
    at = EACH - 190  # on each device, within the longest of the last prefixes
    case, given = forgetting("float32", (None, None, None))
    for device in range(3):
        first = device * EACH + at
        given.a[:, first : first + 80] = 2.0**-4
    for where in (5, EACH + at - 5):
        end = (where // EACH + 1) * EACH
        given.b[0, where, 1] = value
        own = oracle_of(case, given).values()[0]
        scan, args = on_devices(*given[:3], count=3)
        h = np.asarray(scan(*args))
        given.b[0, where, 1] = 0
        others = oracle_of(case, given).values()[0]
        for part, oracle in ((np.s_[:, :end], own), (np.s_[:, end:], others)):
            check(h[part], Expected(oracle.value[part], oracle.bound[part]))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.usefixtures("short_prefixes")
def test_N1_what_is_not_finite_ends_at_a_reset(value):
    """Within a device's first steps: the last state is as if nothing had come before."""
    case, given = forgetting("float32", (5, 5, 5))
    given.b[:, EACH - 1, 1] = value
    reset = np.zeros((2, 3 * EACH), bool)
    reset[:, EACH + 7] = True
    scan, args = on_devices(*given[:3], reset, count=3, return_state=True)
    oracle = oracle_of(case._replace(reset=reset.shape), given._replace(reset=reset))
    for x, expected in zip(scan(*args), oracle.values(), strict=True):
        check(x, expected)


@pytest.mark.parametrize(
    ("grows", "decays", "until"),
    [
        ((0, 3), (3, 45), 2 * EACH),  # the state overflows, but not the product that is passed on
        ((50, 53), (53, 100), 2 * EACH),  # not within the first steps that are always scanned again
        ((0, 9), (9, 96), 3 * EACH),
        ((50, 60), (60, 150), 3 * EACH),
    ],
)
@pytest.mark.usefixtures("short_prefixes")
def test_N1_what_overflows_on_its_way_is_not_forgotten(grows, decays, until):
    """Though the product of all factors so far is nothing, the state before them has become more.

    The oracle works in float64, in which nothing overflows here, so the loop is one in float32.
    """
    _, given = forgetting("float32", (5, None, 300))
    for (first, last), factor in (((0, grows[0]), 1), (grows, 2.0**16), (decays, 2.0**-4)):
        given.a[:, EACH + first : EACH + last] = factor
    given.b[:, EACH - 1] = 2.0**80
    a, b = given[:2]
    scan, args = on_devices(a, b, count=3)
    h, expected = np.asarray(scan(*args)), np.asarray(lax_scan(a, b))
    assert np.isinf(expected[:, EACH + grows[1] :]).all()
    h, expected = h[:, :until], expected[:, :until]
    np.testing.assert_array_equal(np.isfinite(h), np.isfinite(expected))
    np.testing.assert_allclose(h[:, :EACH], expected[:, :EACH], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mapped", ["a", "b"])
@pytest.mark.usefixtures("short_prefixes")
def test_S3_vmap_of_states_that_are_forgotten(mapped):
    """The factors of all entries decide together."""
    _, given = forgetting("float32", (5, 52, 110))
    _, slow = forgetting("float32", (None, 52, None))
    over = mesh(t=3)
    a = np.stack([given.a[0], slow.a[0]]) if mapped == "a" else given.a[0]
    scan = partial(sequence_parallel_scan, axis_name="t", axis=0)
    scan = jax.vmap(scan, in_axes=(0 if mapped == "a" else None, 0))
    specs = P(*(None,) * (a.ndim - 2), "t"), P(None, "t")

    def f(a, b):
        h, pull = jax.vjp(scan, a, b)
        return h, pull(b)

    f = jax.shard_map(f, mesh=over, in_specs=specs, out_specs=(specs[1], specs))
    h, (da, db) = jax.jit(f)(put(a, over, specs[0]), put(given.b, over, specs[1]))
    oracle = Oracle(a, given.b)
    check(h, oracle.values()[0])
    check(da, oracle.cotangents(given.b)["a"])
    check(db, oracle.cotangents(given.b)["b"])


@pytest.mark.usefixtures("short_prefixes")
def test_S3_forgotten_outside_of_jit(monkeypatch):
    monkeypatch.setattr(_sequence, "_RATIO", 8)
    _, given = forgetting("float32", (5, 52, None))
    over = mesh(t=3)
    split = P(None, "t")
    scan = partial(sequence_parallel_scan, axis_name="t")
    f = jax.shard_map(scan, mesh=over, in_specs=(split, split), out_specs=split)
    args = [put(x, over, split) for x in given[:2]]
    check(f(*args), Oracle(*given[:2]).values()[0])


def test_S3_what_is_sent_does_not_depend_on_what_is_forgotten(monkeypatch):
    functions = ("value", "gradient", "tangent", "second")
    usual = {name: communication(4096, name) for name in functions}
    monkeypatch.setattr(_sequence, "_PREFIX", 64)
    _sequence._mapped.cache_clear()
    for name in functions:
        sent, kernels = communication(4096, name)
        assert sent == usual[name][0]
        assert len(kernels) > len(usual[name][1])
    _sequence._mapped.cache_clear()


@pytest.mark.usefixtures("short_prefixes")
def test_S3_no_decision_copies_h():
    """Of the arrays of a device there is none that is neither an argument nor a result."""
    over, split = mesh(t=3), P(None, "t")
    each = 4 * EACH

    def f(a, b):
        return sequence_parallel_scan(a, b, sharding=NamedSharding(over, split))

    def gradients(a, b, g):
        h, pull = jax.vjp(f, a, b)
        return h, pull(g)

    x = put(np.ones((1, 3 * each, 5), np.float32), over, split)
    for function, args in ((f, (x, x)), (gradients, (x, x, x))):
        program = jax.jit(function).lower(*args).compile()
        assert f"f32[1,{each},5]" in program.as_text()
        assert not re.search(rf"f32\[1,{each},5\]\S* copy\(", program.as_text())


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_S3_products_of_many_channels_are_forgotten(dtype):
    """Taken step by step, one of factors above 1/2 may end at a subnormal number, not at zero."""
    a = jnp.full((1, 2048, 8192), 0.7, dtype)
    recurrence = Recurrence(1, 2048, False, True, np.dtype(state_dtype(a.dtype)))
    assert not np.asarray(jax.jit(partial(_summary.reach, recurrence, (1024,)))({"a": a})).any()
    find = jax.jit(partial(_summary.summary, recurrence, (1024,)))
    product, result = find({"a": a, "b": jnp.ones_like(a)})
    assert not np.asarray(product).any()
    np.testing.assert_allclose(np.asarray(result), 1 / (1 - 0.7), rtol=1e-5)
