"""jax_scan.torch against the plain loop in torch, on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import oracles
import pytest

if os.environ.get("JAX_SCAN_REQUIRE_TORCH") == "1":
    import torch
else:
    torch = pytest.importorskip("torch", exc_type=ModuleNotFoundError)

import jax_scan
import jax_scan.torch as adapter
from jax_scan.torch import ModelNew, Reference, linear_scan

# torch's forward mode loads parts of it that warn about torch itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
WIDE = [torch.float64, torch.complex128]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.complex64, *WIDE]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 2e-5, torch.complex64: 2e-5}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def loop(
    a, b, h0=None, *, axis=-2, reverse=False, reset=None, return_state=False, out_dtype=None
) -> Any:
    """The recurrence step by step, differentiable, in b's device and the dtype of the state."""
    dtype = out_dtype or torch.promote_types(a.dtype, b.dtype)
    state = torch.promote_types(
        torch.promote_types(dtype, torch.promote_types(a.dtype, b.dtype)), torch.float32
    )
    axis %= b.ndim
    a = a.to(state).expand(b.shape).movedim(axis, 0)
    b = b.to(state).movedim(axis, 0)
    if reset is not None:
        reset = reset.expand(b.movedim(0, axis).shape[: axis + 1]).movedim(axis, 0)
        reset = reset.reshape(*reset.shape, *(1,) * (b.ndim - reset.ndim))
    steps = range(b.shape[0])
    h = None if h0 is None else h0.to(state).expand(b.shape[1:])
    out = [None] * b.shape[0]
    for t in reversed(steps) if reverse else steps:
        now = b[t] if h is None else a[t] * h + b[t]
        if reset is not None and h is not None:
            now = torch.where(reset[t], b[t], now)
        h = out[t] = now
    y = torch.stack(out).movedim(0, axis).to(dtype)
    return (y, h) if return_state else y


def random(shape, dtype=torch.float32, device="cpu", seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    if dtype.is_complex:
        x = torch.complex(x, torch.randn(shape, dtype=torch.float64, generator=generator)) / 2
    return (x / 1.5).to(device=device, dtype=dtype).requires_grad_(grad)


def _gradients(results, tensors, cotangents):
    # The loop does not use every factor at L = 1; ours then has a gradient of zeros.
    options = {"allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(results, tensors, cotangents, **options) if tensors else ()


def close(got, want, tolerance=None):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.device == want.device
    tolerance = tolerance or TOLERANCE.get(got.dtype, 1e-12)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def check(a, b, h0=None, **options):
    """Values and gradients of all that requires one, against the loop."""
    tensors = [x for x in (a, b, h0) if x is not None and x.requires_grad]

    def run(function):
        result = function(a, b, h0, **options)
        results = result if isinstance(result, tuple) else (result,)
        cotangents = [random(r.shape, r.dtype, r.device, seed=k) for k, r in enumerate(results)]
        return results, _gradients(results, tensors, cotangents)

    (got, got_gradients), (want, want_gradients) = run(linear_scan), run(loop)
    for x, y in zip((*got, *got_gradients), (*want, *want_gradients), strict=True):
        close(x, y)


# ---- Values and gradients ------------------------------------------------------------------------


def test_model_and_reference(device):
    a, b = (random((2, 65, 7), device=device, seed=s, grad=True) for s in (1, 2))
    got, want = ModelNew(7)(a, b), Reference(7)(a, b)
    close(got, want)
    g = random(got.shape, device=device)
    for x, y in zip(
        torch.autograd.grad(got, (a, b), g), torch.autograd.grad(want, (a, b), g), strict=True
    ):
        close(x, y)
    assert list(ModelNew(7).parameters()) == []
    assert repr(ModelNew(7)) == "ModelNew(d_model=7)"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_dtypes(device, dtype, reverse):
    a, b = (random((2, 33, 3), dtype, device, seed=s, grad=True) for s in (1, 2))
    h0 = random((2, 3), dtype, device, seed=3, grad=True)
    check(a, b, reverse=reverse)
    check(a, b, h0, reverse=reverse, return_state=True)


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "h0_shape", "axis"),
    [
        ((9,), (9,), (), 0),
        ((4,), (2, 9, 4), (4,), -2),
        ((9, 1), (2, 9, 4), (2, 1), 1),
        ((2, 1, 4), (2, 9, 4), (2, 4), 1),
        ((3, 1, 9), (3, 5, 9), (3, 5), -1),
        ((2, 3, 9, 2, 2), (2, 3, 9, 2, 2), (1, 3, 2, 2), 2),
    ],
)
@pytest.mark.parametrize("reset", [False, True])
def test_shapes(device, a_shape, b_shape, h0_shape, axis, reset):
    a, b, h0 = (
        random(shape, torch.float64, device, seed=s, grad=True)
        for s, shape in enumerate((a_shape, b_shape, h0_shape))
    )
    leading = b_shape[: axis % len(b_shape) + 1]
    mask = random(leading, device=device, seed=5) > 0.5 if reset else None
    check(a, b, axis=axis, reset=mask)
    check(a, b, h0, axis=axis, reset=mask, return_state=True, reverse=True)


def test_mixed_dtypes(device):
    a = random((2, 20, 4), torch.float32, device, seed=1, grad=True)
    b = random((2, 20, 4), torch.bfloat16, device, seed=2, grad=True)
    assert linear_scan(a, b).dtype is torch.float32
    check(a, b)
    check(a, b, out_dtype=torch.float64)


@pytest.mark.parametrize("needed", ["a", "b", "h0", "a b", "b h0"])
def test_only_what_is_needed(device, needed):
    x: dict[str, Any] = {
        name: random(shape, torch.float64, device, seed=s, grad=name in needed.split())
        for s, (name, shape) in enumerate({"a": (2, 9, 3), "b": (2, 9, 3), "h0": (2, 3)}.items())
    }
    check(x["a"], x["b"], x["h0"], return_state=True)
    state = linear_scan(**x, return_state=True)[1]  # one of two results alone
    inputs = [t for t in x.values() if t.requires_grad]
    got = torch.autograd.grad(state.abs().sum(), inputs)
    want = torch.autograd.grad(loop(**x, return_state=True)[1].abs().sum(), inputs)
    for g, w in zip(got, want, strict=True):
        close(g, w)


def test_b_is_not_kept_for_backward(device):
    a, b = (random((2, 9, 3), device=device, seed=s, grad=True) for s in (1, 2))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        h = linear_scan(a, b)
    assert {t.data_ptr() for t in saved} == {a.data_ptr(), h.data_ptr()}


def test_write_between_forward_and_backward_is_noticed(device):
    a, b = (random((2, 9, 3), device=device, seed=s, grad=True) for s in (1, 2))
    h = linear_scan(a, b)
    with torch.no_grad():
        h.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize(
    ("options", "full"),
    [({}, False), ({"axis": -1, "reverse": True}, False), ({"return_state": True}, True)],
    ids=["a b", "a b reverse, time last", "a b h0 reset"],
)
def test_gradcheck(device, dtype, options, full):
    shape = (2, 4, 3)
    axis = options.get("axis", -2)
    step = [n for k, n in enumerate(shape) if k != axis % 3]
    a, b = (random(shape, dtype, device, seed=s, grad=True) for s in (1, 2))
    tensors = [a, b, *([random(step, dtype, device, seed=3, grad=True)] if full else [])]
    reset = random(shape[: axis % 3 + 1], device=device, seed=4) > 0.6 if full else None

    def function(*tensors):
        return linear_scan(*tensors, reset=reset, **options)

    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_64_bits_with_and_without_jax_enable_x64(device, dtype, x64):
    a, b, h0 = (
        random(shape, dtype, device, seed=s, grad=True)
        for s, shape in enumerate([(2, 9, 3), (2, 9, 3), (2, 3)])
    )
    with jax.enable_x64(x64):
        check(a, b, h0, return_state=True)
        check(a.detach().to(torch.complex64), b, out_dtype=torch.complex128)
        if dtype is torch.float64:
            check(a.float().requires_grad_(), b, out_dtype=torch.float32)
            check(a.float().detach(), b.float().detach(), out_dtype=dtype)
        assert (jax.numpy.ones(1).dtype == np.float64) == x64


# ---- D1: strides ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 1:],
        lambda x: x.transpose(1, 2),
        lambda x: x[..., ::2],
        lambda x: x[:1].expand(4, -1, -1),
        lambda x: x[:, :1],
        lambda x: x[:, :, :1],
        lambda x: x[0, 0].unsqueeze(0).unsqueeze(0),
        lambda x: x[:, 0].unsqueeze(1),
        lambda x: x[:, 0].unsqueeze(0).transpose(0, 1),
        lambda x: x.flip(1),
        lambda x: x.permute(2, 1, 0),
        lambda x: x.movedim(0, 1)[:, :1],
    ],
)
def test_D1_views(device, view, dtype):
    a, b = (view(random((2, 6, 5), dtype, device, seed=s, grad=True)) for s in (1, 2))
    leaves = [x.detach().requires_grad_() for x in (a, b)]
    assert [x.stride() for x in leaves] == [a.stride(), b.stride()]
    check(*leaves)


def test_D1_gradients_of_a_view_reach_its_base(device):
    base = random((2, 6, 5), device=device, grad=True)
    a, b = base[:, ::2], base.transpose(0, 1)[:3].transpose(0, 1)
    got, want = (torch.autograd.grad(f(a, b).square().sum(), base)[0] for f in (linear_scan, loop))
    close(got, want)


def test_D1_E2_storage_offset(device):
    flat = random((200,), device=device)
    for offset in (1, 2, 3, 15, 16):
        x = flat[offset : offset + 90].view(2, 9, 5)
        check(x, x)


@pytest.mark.parametrize("length", [31, 33, 127, 129, 1023, 1025, 4095, 4097])
@pytest.mark.parametrize("channels", [1, 3, 16])
def test_E2_nan_around_the_buffers(device, length, channels):
    """JAX reads torch's memory in place; nothing before or after an operand reaches a result."""
    size = length * channels
    tensors = []
    for seed in range(3):
        around = torch.full((size + 128,), float("nan"), device=device)
        inside = around[64 : 64 + size].view(1, length, channels)
        inside[:] = random(inside.shape, device=device, seed=seed).clamp(-0.9, 0.9)
        tensors.append(inside)
    a, b = (x.detach().requires_grad_() for x in tensors[:2])
    h = linear_scan(a, b)
    da, db = torch.autograd.grad(h, (a, b), tensors[2])
    x, y, g = (t.detach().cpu().numpy() for t in tensors)
    oracle = oracles.Oracle(x, y)
    expected = oracle.cotangents(g)
    for got, want in ((h, oracle.values()[0]), (da, expected["a"]), (db, expected["b"])):
        oracles.check(got.detach().cpu().numpy(), want)


def test_D1_conjugate_and_negative_bits(device):
    x = random((2, 6, 3), torch.complex64, device)
    assert x.conj().is_conj()
    check(x.conj(), x)
    assert x.conj().imag.is_neg()
    check(x.conj().imag, x.real)


def test_D1_numpy_negative_strides():
    x = np.linspace(-1, 1, 30, dtype=np.float32).reshape(2, 5, 3)
    got = jax.jit(lambda a, b: jax_scan.linear_scan(a, b))(x[:, ::-1], x[::-1])
    want = loop(torch.from_numpy(x[:, ::-1].copy()), torch.from_numpy(x[::-1].copy()))
    np.testing.assert_allclose(np.asarray(got), want.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 5, 3), (2, 5, 0), (1, 1, 1), (0, 0, 0)])
@pytest.mark.parametrize("with_h0", [False, True])
def test_E1_zero_sizes(device, shape, with_h0):
    a, b = (random(shape, device=device, seed=s, grad=True) for s in (1, 2))
    h0 = random((shape[0], shape[2]), device=device, seed=3, grad=True) if with_h0 else None
    h, state = linear_scan(a, b, h0, return_state=True)
    assert h.shape == shape
    assert state.shape == (shape[0], shape[2])
    inputs = [x for x in (a, b, h0) if x is not None]
    gradients = torch.autograd.grad(h.sum(), inputs)
    assert [g.shape for g in gradients] == [x.shape for x in inputs]
    if shape[1] == 0 and h0 is not None:
        assert torch.equal(gradients[2], torch.zeros_like(h0))
        assert torch.equal(state, h0)
    close(Reference(shape[2])(a, b), ModelNew(shape[2])(a, b))


def test_results_do_not_share_memory_with_operands(device):
    # At L = 1 the result equals b, and the state equals h: they must still be tensors of their own.
    a, b = (random((2, 1, 3), device=device, seed=s) for s in (1, 2))
    kept = b.clone()
    h, state = linear_scan(a, b, return_state=True)
    h.zero_()
    assert torch.equal(b, kept)
    assert torch.equal(state, kept[:, 0])


# ---- D3: dtypes by name, parameters, the same tensor twice, no trip through the host -------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8], ids=str)
def test_D3_integers_are_refused_by_name(device, dtype):
    x = random((2, 5, 3), device=device)
    for tensors in ((x.to(dtype), x), (x, x.to(dtype)), (x, x, x[:, 0].to(dtype))):
        with pytest.raises(TypeError, match=str(dtype)):
            linear_scan(*tensors)
    with pytest.raises(TypeError, match=str(dtype)):
        linear_scan(x, x, out_dtype=dtype)


def test_D3_reset_must_be_bool(device):
    x = random((2, 5, 3), device=device)
    with pytest.raises(TypeError, match=r"reset.*torch\.float32"):
        linear_scan(x, x, reset=x)


def test_D3_parameters(device):
    a = torch.nn.Parameter(random((4,), device=device, seed=1))
    b = torch.nn.Parameter(random((2, 9, 4), device=device, seed=2))
    check(a, b)
    with torch.no_grad():
        assert not linear_scan(a, b).requires_grad
    with torch.inference_mode():
        close(linear_scan(a, b), loop(a, b))


def test_D3_same_tensor_twice(device):
    x = random((2, 9, 4), device=device, grad=True)
    got, want = (torch.autograd.grad(f(x, x).square().sum(), x)[0] for f in (linear_scan, loop))
    close(got, want)
    assert torch.equal(linear_scan(x, x), linear_scan(x, x))


def test_D3_no_host_copies(device, monkeypatch):
    a, b = (random((2, 9, 16), device=device, seed=s, grad=True) for s in (1, 2))
    seen = []
    bridge = adapter._bridge(a.device)
    to_jax = bridge.to_jax

    def spy(tensors):
        arrays, stream = to_jax(tensors)
        seen.extend(
            (t.data_ptr(), x.unsafe_buffer_pointer()) for t, x in zip(tensors, arrays, strict=True)
        )
        return arrays, stream

    monkeypatch.setattr(bridge, "to_jax", spy)
    with jax.transfer_guard("disallow"):
        h = linear_scan(a, b)
        torch.autograd.grad(h, (a, b), torch.ones_like(h))
    assert len(seen) == 5  # a, b; a, h, g
    assert all(ours == theirs for ours, theirs in seen)


def test_D3_public_import_gives_the_same(device, monkeypatch):
    a, b = (random((2, 9, 3), device=device, seed=s) for s in (1, 2))
    want = linear_scan(a, b)
    monkeypatch.setattr(adapter, "_import_capsule", None)
    assert torch.equal(linear_scan(a, b), want)


# ---- Errors --------------------------------------------------------------------------------------


def test_S3_devices_must_agree():
    x = random((2, 5, 3))
    with pytest.raises(ValueError, match="cpu and meta"):
        linear_scan(x, x.to("meta"))
    with pytest.raises(RuntimeError, match="meta"):
        linear_scan(x.to("meta"), x.to("meta"))


def test_device_that_jax_does_not_have(monkeypatch):
    def devices(platform):
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(RuntimeError, match="no cuda devices"):
        adapter._bridge.__wrapped__(torch.device("cuda", 0))


# ---- D4: streams ---------------------------------------------------------------------------------


def test_D4_buffers_may_be_reused_at_once(device):
    a, b = (random((8, 512, 128), device=device, seed=s) for s in (1, 2))
    a = a.clamp(-0.9, 0.9)
    want = loop(a, b)
    for _ in range(5):
        x, y = a.clone(), b.clone()
        got = linear_scan(x, y)
        x.fill_(float("nan"))
        y.fill_(float("nan"))
        del x, y
        torch.full_like(b, float("nan"))
        close(got, want, 1e-4)


def test_D4_freed_results(device):
    a, b = (random((8, 512, 128), device=device, seed=s) for s in (1, 2))
    a = a.clamp(-0.9, 0.9)
    want = linear_scan(a, b).double().sum()
    sums = []
    for k in range(20):
        sums.append(linear_scan(a, b).double().sum())
        jax.numpy.full((8, 512, 128), k, np.float32)  # would take the freed result's memory
    assert all(torch.equal(s, want) for s in sums)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")


@gpu
@pytest.mark.gpu
def test_D4_side_stream():
    side = torch.cuda.Stream()
    a, b = (random((8, 2048, 256), device="cuda", seed=s).clamp(-0.9, 0.9) for s in (1, 2))
    want = linear_scan(a, b) * 2
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            x, y = a * 1, b * 1  # ready only after the sleep
            got = linear_scan(x, y) * 2
        side.synchronize()
        assert torch.equal(got, want)


@gpu
@pytest.mark.gpu
def test_D4_results_are_given_back():
    bridge = adapter._bridge(torch.device("cuda", 0))
    assert isinstance(bridge, adapter._CudaBridge)
    a, b = (random((2, 64, 64), device="cuda:0", seed=s) for s in (1, 2))
    torch.cuda.synchronize()
    live = len(bridge.live)
    h = linear_scan(a, b)
    view = h[0]
    del h
    assert len(bridge.live) == live + 1
    del view
    assert len(bridge.live) == live
    linear_scan(a, b)
    assert len(bridge.freed) <= 1


@gpu
@pytest.mark.gpu
def test_D4_arrays_serve_later_tensors_at_an_address():
    bridge = adapter._bridge(torch.device("cuda", 0))
    assert isinstance(bridge, adapter._CudaBridge)
    a = random((2, 64, 64), device="cuda:0").clamp(-0.9, 0.9)
    b = torch.empty_like(a)
    for seed in range(3):
        b.copy_(random(b.shape, seed=seed))
        made = len(bridge.views)
        close(linear_scan(a, b), loop(a, b), 1e-4)
        assert seed == 0 or len(bridge.views) == made
    for array in bridge.views.values():  # as one may do with jax.live_arrays()
        array.delete()
    close(linear_scan(a, b), loop(a, b), 1e-4)
    for n in range(600):
        bridge.view(a.view(-1)[:n])
    assert len(bridge.views) <= 256
    close(linear_scan(a, b), loop(a, b), 1e-4)


@gpu
@pytest.mark.gpu
def test_D4_operand_of_another_stream_is_not_reused_too_early():
    side = torch.cuda.Stream()
    a, b = (random((8, 2048, 256), device="cuda", seed=s).clamp(-0.9, 0.9) for s in (1, 2))
    want = linear_scan(a, b)
    for _ in range(3):
        with torch.cuda.stream(side):
            x, y = a * 1, b * 1
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda._sleep(20_000_000)
        got = linear_scan(x, y)
        del x, y
        with torch.cuda.stream(side):
            kept = [torch.full_like(b, float("nan")) for _ in range(2)]
        assert torch.equal(got, want)
        del kept


def test_options_that_equal_others_do_not_take_their_place():
    a, b = (random((2, 9, 3), seed=s) for s in (1, 2))
    for wrong in ({"axis": True}, {"axis": 1.0}, {"axis": torch.tensor(1.0)}, {"reverse": "no"}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            linear_scan(a, b, **wrong)
    for wrong in ({"return_state": torch.ones(2)}, {"axis": [1]}, {"out_dtype": [1]}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            linear_scan(a, b, **wrong)
    torch.testing.assert_close(linear_scan(a, b, axis=1), Reference(3)(a, b))


@gpu
@pytest.mark.gpu
def test_D4_graph_capture_is_refused():
    a, b = (random((2, 9, 3), device="cuda", seed=s) for s in (1, 2))
    linear_scan(a, b)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        a.add(b)  # torch warns of a graph without work
        with pytest.raises(RuntimeError, match="CUDA graph"):
            linear_scan(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.gpu
def test_S3_current_device_does_not_matter():
    with torch.cuda.device(0):
        a, b = (random((2, 9, 3), device="cuda:1", seed=s, grad=True) for s in (1, 2))
        check(a, b)
        with pytest.raises(ValueError, match="cuda:0 and cuda:1"):
            linear_scan(a.to("cuda:0"), b)


# ---- D5: torch.compile, torch.func ---------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # what torch's compiler says about itself
def test_D5_compile(device):
    model = ModelNew(4).to(device)
    compiled = torch.compile(lambda a, b: model(a.sigmoid(), b).sin(), backend="aot_eager")
    x = [random((2, 16, 4), device=device, seed=s, grad=True) for s in (1, 2)]
    got, want = compiled(*x), loop(x[0].sigmoid(), x[1]).sin()
    close(got, want)
    for g, w in zip(
        torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x), strict=True
    ):
        close(g, w)


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0), (1, 2)], ids=str)
def test_D5_vmap(device, dims):
    shape = (2, 5, 3)
    a, b = (
        random(shape if d is None else (*shape[:d], 4, *shape[d:]), torch.float64, device, seed=s)
        for s, d in enumerate(dims)
    )
    model, reference = ModelNew(3), Reference(3)
    close(torch.func.vmap(model, dims)(a, b), torch.func.vmap(reference, dims)(a, b))

    def gradient(f):
        return torch.func.vmap(torch.func.grad(lambda a, b: f(a, b).square().sum(), (0, 1)), dims)(
            a, b
        )

    for x, y in zip(gradient(model), gradient(reference), strict=True):
        close(x, y)


@pytest.mark.parametrize("transform", ["jacrev", "jacfwd", "hessian"])
def test_D5_jacobians(device, transform):
    a, b = (random((2, 3, 2), torch.float64, device, seed=s) for s in (1, 2))
    transform = getattr(torch.func, transform)

    def of(f):
        return transform(lambda a: f(a, b).square().sum(0))(a)

    close(of(linear_scan), of(loop))


def test_forward_mode(device):
    a, b, da, db = (random((2, 9, 3), torch.float64, device, seed=s) for s in range(4))

    def of(f):
        with torch.autograd.forward_ad.dual_level():
            dual = [torch.autograd.forward_ad.make_dual(*x) for x in ((a, da), (b, db))]
            return torch.autograd.forward_ad.unpack_dual(f(*dual)).tangent

    close(of(linear_scan), of(loop))


# ---- B5: both frameworks in one process ----------------------------------------------------------


@pytest.mark.parametrize("order", [("torch", "jax_scan.torch"), ("jax_scan.torch", "torch")])
def test_B5_either_import_order(order):
    code = f"""
import {order[0]}, {order[1]}, sys
device = "cuda" if sys.modules["torch"].cuda.is_available() else "cpu"
x = sys.modules["torch"].ones(2, 5, 3, device=device)
assert jax_scan.torch.ModelNew(3)(x, x)[0, -1, 0].item() == 5
"""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=240)


def test_B5_the_adapter_names_the_allocator_settings():
    for name in ("PREALLOCATE", "MEM_FRACTION", "ALLOCATOR"):
        assert f"XLA_PYTHON_CLIENT_{name}=" in adapter.__doc__


def test_B5_jax_scan_does_not_import_torch():
    code = "import sys, jax_scan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_threads(device):
    from concurrent.futures import ThreadPoolExecutor

    a, b = (random((2, 64, 8), device=device, seed=s).clamp(-0.9, 0.9) for s in (1, 2))
    want = linear_scan(a, b)
    if device == "cuda":
        torch.cuda.synchronize()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: linear_scan(a, b), range(200)))
    assert all(torch.equal(r, want) for r in results)


def test_threads_with_copies(device):
    from concurrent.futures import ThreadPoolExecutor

    a, b = (random((2, 8, 64), device=device, seed=s).clamp(-0.9, 0.9).mT for s in (1, 2))
    want = linear_scan(a, b)
    if device == "cuda":
        torch.cuda.synchronize()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: linear_scan(a, b), range(200)))
    assert all(torch.equal(r, want) for r in results)
