"""Arrays sharded over batch and channels: each device scans its part, and nothing is gathered."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import handlers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments
from devices import calls, collectives, mesh, partitioner, put
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import Oracle, check, same
from programs import lax_scan

import jax_scan
from jax_scan import _native, linear_scan

SIZES = {"x": 2, "y": 2, "z": 2}


class Sharded(NamedTuple):
    """A case, and over which mesh axes each axis of b is split; other operands likewise."""

    case: Case
    spec: P
    local: tuple[int, ...]  # b on one device, as the kernel sees it: time last


SHARDED = {
    "batch": Sharded(Case("", (8, 12, 6), h0=(8, 6)), P("x"), (4, 6, 12)),
    "batch over four devices": Sharded(Case("", (8, 64, 4)), P(("x", "y")), (2, 4, 64)),
    "batch over two axes": Sharded(Case("", (8, 12, 6)), P(("x", "y")), (2, 6, 12)),
    "channels": Sharded(Case("", (3, 12, 8), reverse=True), P(None, None, ("x", "z")), (3, 2, 12)),
    "both": Sharded(
        Case("", (4, 12, 8), h0=(4, 8), reset=(4, 12)), P("x", None, ("y", "z")), (2, 2, 12)
    ),
    "time first": Sharded(Case("", (12, 4, 6), axis=0, h0=(4, 6)), P(None, "y", "x"), (2, 3, 12)),
    "time last": Sharded(
        Case("", (4, 8, 12), axis=-1, reverse=True, reset=(12,)), P("x", ("y", "z")), (2, 2, 12)
    ),
    "time in the middle": Sharded(
        Case("", (4, 2, 12, 6, 2), axis=2, h0=(6, 1)), P("x", "y", None, "z"), (2, 1, 3, 2, 12)
    ),
    "a shared over batch and time": Sharded(
        Case("", (8, 12, 4), a=(4,), h0=(4,)), P("x", None, "z"), (4, 2, 12)
    ),
    "a shared over the batch": Sharded(
        Case("", (8, 12, 4), a=(12, 4)), P(("x", "y", "z")), (1, 4, 12)
    ),
    "a shared over channels": Sharded(
        Case("", (2, 12, 8), a=(2, 12, 1), reset=(12,)), P(None, None, ("x", "y")), (2, 2, 12)
    ),
    "a shared by all": Sharded(Case("", (4, 12, 8), a=()), P("x", None, "y"), (2, 4, 12)),
    "batch shorter than the mesh": Sharded(
        Case("", (2, 12, 4), a=(12, 4), reset=(12,), h0=(1, 4)), P("x", None, "y"), (1, 2, 12)
    ),
}
MODES = {
    "shardy": (AxisType.Auto, True),
    "gspmd": (AxisType.Auto, False),
    "explicit": (AxisType.Explicit, True),
}


def like(spec, shape, full):
    """How an operand of this shape, which broadcasts to `full`, is split if b is split by spec."""
    spec = (*spec, *[None] * (len(full) - len(spec)))[len(full) - len(shape) :]
    own = full[len(full) - len(shape) :]
    return P(*(s if n == m else None for s, n, m in zip(spec, shape, own, strict=True)))


def sharded(over, given, case, spec):
    """a, b, h0 and reset on the mesh."""
    a, b, h0, reset = given
    axis = case.axis % b.ndim
    entries = (*spec, *[None] * (b.ndim - len(spec)))
    step = (*entries[:axis], *entries[axis + 1 :])
    return (
        put(a, over, like(spec, a.shape, b.shape)),
        put(b, over, spec),
        None if h0 is None else put(h0, over, like(step, h0.shape, case.step)),
        None
        if reset is None
        else put(reset, over, like(entries[: axis + 1], reset.shape, b.shape[: axis + 1])),
    )


def oracle_of(case, given):
    a, b, h0, reset = given
    return Oracle(a, b, h0, axis=case.axis, reverse=case.reverse, reset=reset)


def scan_of(case):
    def scan(a, b, h0, reset):
        return linear_scan(
            a, b, h0, axis=case.axis, reverse=case.reverse, reset=reset, return_state=True
        )

    return scan


def split_like(x, y):
    return x.sharding.is_equivalent_to(y.sharding, y.ndim)


def run(f, *args):
    """Results, and the compiled text."""
    compiled = jax.jit(f).lower(*args).compile()
    return compiled(*args), compiled.as_text()


# Every case with Shardy; with the others those whose operands differ in shape.
EVERY = [(name, "shardy") for name in SHARDED] + [
    (name, mode)
    for name, (case, *_) in SHARDED.items()
    for mode in ("gspmd", "explicit")
    if case.a is not None or case.h0 is not None
]


@pytest.mark.parametrize(("name", "mode"), EVERY)
def test_S1_values_and_gradients(name, mode):
    case, spec, local = SHARDED[name]
    axis_type, shardy = MODES[mode]
    over = mesh(axis_type, **SIZES)
    given = arguments(case)
    oracle = oracle_of(case, given)
    g = np.random.default_rng(1).normal(size=case.shape).astype(np.float32)
    scan = scan_of(case)

    def both(a, b, h0, reset, g):
        primals = (a, b) if h0 is None else (a, b, h0)
        out, pull = jax.vjp(lambda a, b, h0=None: scan(a, b, h0, reset), *primals)
        return out, pull((g, jnp.zeros_like(out[1])))

    with jax.set_mesh(over), partitioner(shardy):
        args = sharded(over, given, case, spec)
        (h, state), value = run(scan, *args)
        (_, gradients), both_text = run(both, *args, put(g, over, spec))
    for x, expected in zip((h, state), oracle.values(), strict=True):
        check(x, expected)
    for x, expected in zip(gradients, oracle.cotangents(g).values(), strict=False):
        check(x, expected)

    assert split_like(h, args[1])
    assert split_like(gradients[1], args[1])
    if case.a is None:
        assert split_like(gradients[0], args[0])
    assert collectives(value) == []
    # What an operand shares is summed, and nothing of b's size is.
    for operation, shape in collectives(both_text):
        assert operation == "all-reduce"
        assert np.prod(shape) <= max(given[0].size if case.a is not None else 0, np.prod(case.step))
    for _, shapes in calls(both_text):
        assert local in shapes
        assert all(n <= m for shape in shapes for n, m in zip(shape, local, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_S1_gradients_send_nothing_if_nothing_is_shared(mode):
    case, spec, _ = SHARDED["both"]
    axis_type, shardy = MODES[mode]
    over = mesh(axis_type, **SIZES)

    def loss(a, b, h0, reset):
        h, state = scan_of(case)(a, b, h0, reset)
        return jnp.sin(h), jnp.cos(state)

    def pull(*args):
        out, pull = jax.vjp(partial(loss, reset=args[3]), *args[:3])
        return pull(jax.tree.map(jnp.ones_like, out))

    def twice(*args):
        return jax.jvp(lambda *x: pull(*x, args[3]), args[:3], args[:3])

    with jax.set_mesh(over), partitioner(shardy):
        args = sharded(over, arguments(case), case, spec)
        out, text = run(twice, *args)
    assert collectives(text) == []
    for x, y in zip(jax.tree.leaves(out), (*args[:3], *args[:3]), strict=True):
        assert split_like(x, y)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_S1_higher_derivatives(axis_type):
    """Against `lax.scan` in float64 on one device."""
    over = mesh(axis_type, x=4, y=2)
    case = Case("", (7, 8, 4), axis=0, h0=(8, 4), reset=(7,))
    a, b, h0, reset = arguments(case, "float64")

    def everything(scan):
        def loss(a, b, h0):
            return jnp.sum(jnp.sin(scan(a, b, h0, reset=reset)))

        grad = jax.grad(loss, (0, 1, 2))

        def squares(*x):
            return sum(jnp.sum(y**2) for y in grad(*x))

        def all_of_it(*x):
            return grad(*x), jax.jvp(grad, x, x)[1], jax.grad(squares, (0, 1, 2))(*x)

        return jax.jit(all_of_it)

    expected = everything(partial(lax_scan, axis=0))(a, b, h0)
    with jax.set_mesh(over):
        spec = P(None, "x", "y")
        args = put(a, over, spec), put(b, over, spec), put(h0, over, P("x", "y"))
        actual = everything(partial(linear_scan, axis=0))(*args)
    jax.tree.map(same, actual, expected)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shared", [False, True])
def test_S1_vmap(axis_type, shared):
    """A mapped axis may be split, and what is not mapped is the same for all."""
    over = mesh(axis_type, x=4, y=2)
    case = Case("", (4, 5, 12, 2), axis=2, a=(5, 12, 2) if shared else None)
    a, b, _, _ = arguments(case)
    g = np.random.default_rng(1).normal(size=b.shape).astype(np.float32)

    def one(a, b, g):
        h, pull = jax.vjp(partial(linear_scan, axis=1), a, b)
        return h, pull(g)

    f = jax.vmap(one, in_axes=(None if shared else 0, 0, 0))
    with jax.set_mesh(over):
        spec = P("x", None, None, "y")
        args = put(a, over, like(spec, a.shape, b.shape)), put(b, over, spec), put(g, over, spec)
        (h, (da, db)), text = run(f, *args)
    oracle = Oracle(np.broadcast_to(a, b.shape), b, axis=2)
    check(h, oracle.values()[0])
    check(da, oracle.cotangents(g)["a"])
    check(db, oracle.cotangents(g)["b"])
    assert collectives(text) == []
    assert split_like(h, args[1])
    assert split_like(db, args[1])


def test_S1_operands_that_are_sharded_differently():
    """Replicated operands, and operands that are split in different axes, meet without gathers."""
    over = mesh(**SIZES)
    case = Case("", (8, 12, 8), h0=(8, 8))
    a, b, h0, _ = arguments(case)
    expected = Oracle(a, b, h0).values()[0]
    for specs in (
        (P(), P("x", None, "y"), P()),
        (P(None, None, "y"), P("x"), P(None, "y")),
        (P("x"), P(), P("x", "z")),
    ):
        args = [put(x, over, spec) for x, spec in zip((a, b, h0), specs, strict=True)]
        h, text = run(linear_scan, *args)
        check(h, expected)
        assert collectives(text) == [], specs


@pytest.mark.parametrize("check_vma", [True, False])
def test_S2_shard_map(check_vma):
    """Split by hand over all axes, a call is as on one device: row-major and without copies."""
    over = mesh(x=4, y=2)
    case = Case("", (8, 12, 4), h0=(8, 4), reset=(8, 12))
    given = arguments(case)
    oracle = oracle_of(case, given)
    specs = (P("x", None, "y"), P("x", None, "y"), P("x", "y"), P("x"))
    outs = (P("x", None, "y"), P("x", "y"))
    f = jax.shard_map(scan_of(case), mesh=over, in_specs=specs, out_specs=outs, check_vma=check_vma)
    g = np.random.default_rng(1).normal(size=case.shape).astype(np.float32)

    def both(a, b, h0, reset, g):
        out, pull = jax.vjp(lambda *x: f(*x, reset), a, b, h0)
        return out, pull((g, jnp.zeros_like(out[1])))

    args = [put(x, over, spec) for x, spec in zip(given, specs, strict=True)]
    (out, gradients), text = run(both, *args, put(g, over, specs[1]))
    for x, expected in zip(out, oracle.values(), strict=True):
        check(x, expected)
    for x, expected in zip(gradients, oracle.cotangents(g).values(), strict=True):
        check(x, expected)
    assert collectives(text) == []
    assert ("scan", [(2, 12, 2), (2, 12, 2), (2, 1, 2), (2, 12, 1)]) in calls(text)
    assert " transpose(" not in text


@pytest.mark.parametrize("check_vma", [True, False])
def test_S2_shard_map_with_a_shared_operand(check_vma):
    """The gradient of what all devices share is the sum over them, and once only."""
    over = mesh(x=8)
    case = Case("", (8, 12, 4), a=(12, 4), h0=(4,))
    a, b, h0, _ = arguments(case)
    g = np.random.default_rng(1).normal(size=case.shape).astype(np.float32)
    f = jax.shard_map(
        linear_scan,
        mesh=over,
        in_specs=(P(), P("x"), P()),
        out_specs=P("x"),
        check_vma=check_vma,
    )
    gradients = jax.jit(lambda *x: jax.vjp(f, *x)[1](jnp.asarray(g)))(a, b, h0)
    for x, expected in zip(gradients, Oracle(a, b, h0).cotangents(g).values(), strict=True):
        check(x, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_S2_shard_map_over_some_axes(check_vma):
    """What is left to XLA inside of it is split by XLA."""
    over = mesh(x=4, y=2)
    case = Case("", (8, 12, 4), h0=(8, 4))
    a, b, h0, _ = arguments(case)
    f = jax.shard_map(
        linear_scan,
        mesh=over,
        in_specs=(P("x"), P("x"), P("x")),
        out_specs=P("x"),
        axis_names={"x"},
        check_vma=check_vma,
    )
    spec = P("x", None, "y")
    g = np.random.default_rng(1).normal(size=case.shape).astype(np.float32)

    def both(a, b, h0, g):
        h, pull = jax.vjp(f, a, b, h0)
        return h, pull(g)

    args = put(a, over, spec), put(b, over, spec), put(h0, over, P("x", "y")), put(g, over, spec)
    (h, gradients), text = run(both, *args)
    oracle = Oracle(a, b, h0)
    check(h, oracle.values()[0])
    for x, expected in zip(gradients, oracle.cotangents(g).values(), strict=True):
        check(x, expected)
    assert collectives(text) == []
    assert {shapes[0] for _, shapes in calls(text)} == {(2, 2, 12)}


def test_S1_sizes_that_do_not_divide():
    """XLA pads an axis that does not divide over the devices; the padding stays out of results."""
    over = mesh(x=8)
    for rows in (3, 6, 12):
        case = Case("", (rows, 12, 4), a=(12, 4), h0=(1, 4), reset=(12,))
        a, b, h0, reset = arguments(case)

        def f(a, b, h0, reset):
            b = lax.with_sharding_constraint(b, NamedSharding(over, P("x")))
            h, pull = jax.vjp(partial(linear_scan, reset=reset), a, b, h0)
            return h, pull(b)

        h, gradients = jax.jit(f)(*(put(x, over, P()) for x in (a, b, h0, reset)))
        oracle = Oracle(a, b, h0, reset=reset)
        check(h, oracle.values()[0])
        for x, expected in zip(gradients, oracle.cotangents(b).values(), strict=True):
            check(x, expected)


def test_S1_eager_calls():
    over = mesh(x=4, y=2)
    a, b, h0, _ = arguments(Case("", (8, 12, 4), h0=(8, 4)))
    spec = P("x", None, "y")
    args = put(a, over, spec), put(b, over, spec), put(h0, over, P("x", "y"))
    h = linear_scan(*args)
    check(h, Oracle(a, b, h0).values()[0])
    assert split_like(h, args[1])
    da = jax.grad(lambda *x: jnp.sum(linear_scan(*x)))(*args)
    check(da, Oracle(a, b, h0).cotangents(np.ones_like(b))["a"])
    assert split_like(da, args[0])


def test_S1_many_axes():
    """More axes than Shardy has letters for, and more alternations than a kernel follows."""
    over = mesh(x=2)
    shape = (2,) * 15 + (3,)
    rng = np.random.default_rng(0)
    b = rng.normal(size=shape).astype(np.float32)
    for a_shape in ((*[1] * 13, 2, 2, 3), (*[1 if k % 2 else 2 for k in range(15)], 3)):
        a = rng.uniform(0.5, 1, a_shape).astype(np.float32)
        args = (
            put(a, over, P(*[None] * 14, "x") if a_shape[0] == 1 else P("x")),
            put(b, over, P("x")),
        )
        h, text = run(partial(linear_scan, axis=-1), *args)
        check(h, Oracle(a, b, axis=-1).values()[0])
        assert len(calls(text)) == 1


def test_X7_export_over_devices():
    """The attributes by which XLA splits a call are exported too, if sizes are known."""
    over = mesh(x=4)
    a, b, _, _ = arguments(Case("", (8, 12, 4)))
    expected = Oracle(a, b).values()[0]
    args = put(a, over, P("x")), put(b, over, P("x"))
    checks = jax_scan.export_checks()
    options = {"platforms": ["cpu"], "disabled_checks": checks}  # those of the mesh's devices
    exported = export.export(jax.jit(linear_scan), **options)(*args)
    h, text = run(export.deserialize(exported.serialize()).call, *args)
    check(h, expected)
    assert collectives(text) == []
    (m,) = export.symbolic_shape("m")
    rows = jax.ShapeDtypeStruct((4 * m, 12, 4), np.float32, sharding=args[0].sharding)
    symbolic = export.export(jax.jit(linear_scan), **options)(rows, rows)
    check(jax.jit(symbolic.call)(*args), expected)


@pytest.mark.parametrize("shardy", [True, False])
def test_S3_time_sharded_arrays_are_gathered(shardy):
    """Right, but each device gets all of time: what `sequence_parallel_scan` is there for."""
    over = mesh(x=4)
    case = Case("", (4, 16, 6), h0=(4, 6))
    a, b, h0, _ = arguments(case)
    args = put(a, over, P(None, "x")), put(b, over, P(None, "x")), put(h0, over, P())
    with partitioner(shardy):
        h, text = run(linear_scan, *args)
    check(h, Oracle(a, b, h0).values()[0])
    gathered = collectives(text)
    assert len(gathered) == 2
    assert all(name == "all-gather" for name, _ in gathered)


def test_S3_explicitly_time_sharded_arrays_are_refused():
    over = mesh(AxisType.Explicit, x=4)
    x = put(np.ones((4, 16, 6), np.float32), over, P(None, "x"))
    with jax.set_mesh(over), pytest.raises(ValueError, match="sequence_parallel_scan with b's"):
        linear_scan(x, x)


def test_S1_explicit_operands_must_agree():
    over = mesh(AxisType.Explicit, x=4, y=2)
    x = np.ones((8, 16, 6), np.float32)
    with jax.set_mesh(over), pytest.raises(ValueError, match="sharded differently in axis 0"):
        linear_scan(put(x, over, P("x")), put(x, over, P("y")))


def test_one_device_needs_no_attributes():
    x = np.ones((4, 16, 6), np.float32)
    text = jax.jit(linear_scan).lower(x, x).as_text()
    assert "num_batch_dims" not in text
    assert "sharding_rule" not in text
    assert "time_last = false" in text


def test_cuda_workspace_is_split_with_the_channels(monkeypatch):
    """The lowering for CUDA, where each device gets the workspace of its own channels."""
    asked = []

    class Module:
        @staticmethod
        def workspace_bytes_per_channel(*args):
            asked.append(args)
            return 48

    monkeypatch.setitem(_native._modules, "cuda", Module)
    over = mesh(x=4, y=2)
    x = put(np.ones((8, 16, 6), np.float32), over, P("x", None, "y"))
    text = jax.jit(linear_scan).trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert asked == [("scan", 16, "float32")]
    assert "tensor<8x6x48xui8>" in text
    assert "tensor<8x6x16xf32>" in text
    assert 'num_batch_dims = "2"' in text
    assert "sharding_rule" in text


def test_S1_what_the_handler_reads():
    """Of equal entries the first only; and shapes with time last, in memory elsewhere."""
    b = np.arange(30, dtype=np.float32).reshape(2, 5, 3)
    a = np.full((7, 5, 1), np.nan, np.float32)
    a[0] = 0.5
    (h,) = handlers.call(a, b, repeated=np.array([1, 0]))
    check(h, Oracle(a[0], b).values()[0])
    x, shapes = np.ones((2, 3, 5), np.float32), [((2, 3, 5), np.float32)]
    (h,) = handlers.call(x, b.reshape(2, 3, 5), time_last=True, shapes=shapes)
    check(h.reshape(2, 5, 3), Oracle(np.ones_like(b), b).values()[0])


@pytest.mark.parametrize("a_shape", [(), (6,), (12, 6), (4, 12, 6)])
@pytest.mark.parametrize("jit", [False, True])
def test_S1_explicit_gradients_of_what_is_sharded_less(a_shape, jit):
    """(Co)tangents have their operand's sharding, not that of those it meets."""
    over = mesh(AxisType.Explicit, x=4, y=2)
    case = Case("", (4, 12, 6), a=a_shape, h0=(4, 6))
    a, b, h0, _ = arguments(case)
    oracle = Oracle(a, b, h0=h0)
    g = np.random.default_rng(0).normal(size=b.shape).astype(b.dtype)

    def loss(a, b, h0, g):
        return jnp.sum(g * linear_scan(a, b, h0))

    with jax.set_mesh(over):
        args = jnp.asarray(a), put(b, over, P("x", None, "y")), jnp.asarray(h0)
        gradient = jax.grad(loss, argnums=(0, 1, 2))
        found = (jax.jit(gradient) if jit else gradient)(*args, put(g, over, P("x", None, "y")))
        for x, dx in zip(args, found, strict=True):
            assert jax.typeof(dx).sharding.spec == jax.typeof(x).sharding.spec
        _, dh = jax.jvp(lambda h0: linear_scan(args[0], args[1], h0), (args[2],), (args[2],))
        assert jax.typeof(dh).sharding.spec == P("x", None, "y")
    expected = oracle.cotangents(g)
    for dx, name in zip(found, ("a", "b", "h0"), strict=True):
        check(dx, expected[name], name)


def test_S1_constants_meet_arrays_on_an_explicit_mesh():
    over = mesh(AxisType.Explicit, x=4)
    _, b, _, _ = arguments(Case("", (4, 12, 6)))
    expected = Oracle(np.float32(0.5), b).values()[0]
    with jax.default_device(over.devices.flat[0]):
        unplaced = jnp.full((4, 12, 6), 0.5, np.float32)
    for a in (0.5, np.full((6,), 0.5, np.float32), unplaced):
        for f in (linear_scan, jax.jit(linear_scan)):
            h = f(a, put(b, over, P("x")))
            check(h, expected)
            assert jax.typeof(h).sharding.spec == P("x", None, None)


def test_S2_mapped_over_a_manual_axis():
    """`spmd_axis_name` marks mapped operands as varying; the others have to follow."""
    over = mesh(x=2, y=4)
    a, b, _, _ = arguments(Case("", (2, 12, 4), a=(12, 4)))
    scan = jax.shard_map(linear_scan, mesh=over, in_specs=P(None, "y"), out_specs=P(None, "y"))
    h = jax.vmap(scan, in_axes=(None, 0), spmd_axis_name="x")(a, b)
    check(h, Oracle(a, b).values()[0])
