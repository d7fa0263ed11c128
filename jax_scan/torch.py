"""The scan for torch tensors: ``linear_scan``, ``ModelNew`` and, for comparison, ``Reference``.

A tensor reaches the same JAX custom call that ``jax_scan.linear_scan`` uses, through DLPack: no
copy of a contiguous tensor, no trip through the host, on the CPU and on CUDA. What torch needs
around it (autograd to any order, forward mode, ``torch.func`` transforms) is built from JAX's own
derivatives of that call.

Two frameworks on one GPU share its memory. JAX takes three quarters of it when it first uses the
device, torch keeps what it has once used. Set one of these before the first use of JAX:

- ``XLA_PYTHON_CLIENT_PREALLOCATE=false``: JAX takes memory as it needs it (the usual choice here);
- ``XLA_PYTHON_CLIENT_MEM_FRACTION=.30``: JAX takes this share of the card and no more;
- ``XLA_PYTHON_CLIENT_ALLOCATOR=platform``: JAX returns memory at once, at the price of an
  allocation for each result, which also waits for the device: for debugging.

Results are allocated by JAX, everything else by torch; ``torch.cuda.empty_cache()`` gives torch's
unused memory back to the card when JAX runs short of it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "jax_scan.torch needs PyTorch, which is not installed: pip install torch", name="torch"
    ) from None
from torch import nn

from jax_scan import _api, _primitives, _reference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ModelNew", "Reference", "linear_scan"]


@overload
def linear_scan(
    a: torch.Tensor,
    b: torch.Tensor,
    h0: torch.Tensor | None = None,
    *,
    axis: int = -2,
    reverse: bool = False,
    reset: torch.Tensor | None = None,
    return_state: Literal[False] = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor: ...
@overload
def linear_scan(
    a: torch.Tensor,
    b: torch.Tensor,
    h0: torch.Tensor | None = None,
    *,
    axis: int = -2,
    reverse: bool = False,
    reset: torch.Tensor | None = None,
    return_state: Literal[True],
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def linear_scan(
    a: torch.Tensor,
    b: torch.Tensor,
    h0: torch.Tensor | None = None,
    *,
    axis: int = -2,
    reverse: bool = False,
    reset: torch.Tensor | None = None,
    return_state: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """h_t = a_t * h_{t-1} + b_t along ``axis``, for torch tensors.

    Everything that ``jax_scan.linear_scan`` says about shapes, dtypes and options holds here, with
    torch's names.

    Args:
      a: factors; broadcasts to b's shape (missing leading axes, axes of size 1) and is not expanded
        in memory.
      b: (..., L, D) with the default axis: any rank from 1 up, any sizes, zero included.
      h0: the state before the first step, b's shape without the time axis, or broadcastable to it.
        Without it the first output is b_0, whatever a_0 holds.
      axis: the time axis.
      reverse: run from the last time to the first; h0 then enters after the last step.
      reset: bool, of the shape of b's axes up to and including time, or broadcastable to it; true
        where a new segment starts: there h_t = b_t, and nothing of the past gets through in value
        or gradient.
      return_state: return (h, state), the state after the last step in the accumulation dtype.
      out_dtype: dtype of h; the promoted dtype of a and b when absent.

    Returns:
      h, of b's shape, on the device of the inputs and in the order of torch's current stream.

    dtypes: float32, bfloat16, float16, float64, complex64, complex128. 16-bit data has a float32
    state. float64 and complex128 keep their precision whether or not ``jax_enable_x64`` is set.

    Gradients: autograd to any order and forward mode. Complex gradients follow torch's convention
    (the conjugate of JAX's). What needs no gradient costs nothing, and b is not kept for the
    backward pass. In a vmap, jacrev or grad of ``torch.func`` the call works as well; torch's
    older batched gradients (``is_grads_batched``, ``vectorize=True``) do not. ``torch.compile``
    runs it as it is, outside its graphs. A CUDA graph of torch's cannot record it.

    Copies: none for a contiguous tensor at a 64-byte boundary, else one on the device.

    Streams: the call reads its inputs after all work queued on the device's current torch stream,
    and whatever is queued there later runs after it, so tensors may be reused at once. A result
    belongs to that stream, as if torch had allocated it there: use on another stream has to be
    ordered as torch asks for its own tensors, and to end before the last reference goes.

    Raises:
      TypeError: not a tensor, a dtype that is not in the list (named), a layout that is not
        strided.
      ValueError: ranks, shapes or ``axis`` that do not fit, tensors on different devices.
      RuntimeError: a device that JAX cannot reach, or a call inside a CUDA graph capture.
    """
    tensors = [a, b] if h0 is None else [a, b, h0]
    for k, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _JAX_DTYPES:
            name = ("a", "b", "h0")[k]
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"linear_scan: {name} must be a torch tensor, got {type(tensor)}")
            raise TypeError(
                f"linear_scan: {name} must have one of the dtypes {_NAMES}, got {tensor.dtype}"
            )
    if reset is not None:
        if not isinstance(reset, torch.Tensor) or reset.dtype is not torch.bool:
            got = getattr(reset, "dtype", type(reset))
            raise TypeError(f"linear_scan: reset must be a torch.bool tensor, got {got}")
        tensors.append(reset)
    if out_dtype is None:
        if a.dtype is not b.dtype:
            out_dtype = torch.promote_types(a.dtype, b.dtype)
    elif not isinstance(out_dtype, torch.dtype) or out_dtype not in _JAX_DTYPES:
        raise TypeError(f"linear_scan: out_dtype must be among {_NAMES}, got {out_dtype!r}")
    # Programs are cached by these options, so each must be what it seems: True == 1 == 1.0.
    axis = _api._axis(axis, b)
    reverse = _api._flag("reverse", reverse)
    return_state = _api._flag("return_state", return_state)
    program = _scan_program(
        axis, reverse, h0 is not None, reset is not None, return_state, out_dtype
    )
    results = _apply(program, tensors)
    return (results[0], results[1]) if return_state else results[0]


if not TYPE_CHECKING:
    # torch.compile calls it between its graphs: its tracer would follow the call into JAX.
    linear_scan = torch.compiler.disable(linear_scan)


class ModelNew(nn.Module):
    """h_t = a_t * h_{t-1} + b_t with h_0 = b_0, for each of ``d_model`` channels on its own.

    ``forward(a, b)`` takes a and b of shape (B, L, d_model) and returns h of that shape. It has no
    parameters.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        _check_model_inputs(self.d_model, a, b)
        return linear_scan(a, b)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}"


class Reference(nn.Module):
    """The same as ``ModelNew``, as a plain loop over time in torch: slow, and easy to trust."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        _check_model_inputs(self.d_model, a, b)
        if b.shape[1] == 0:
            return torch.empty_like(b)
        h = b[:, 0]
        steps = [h]
        for t in range(1, b.shape[1]):
            h = a[:, t] * h + b[:, t]
            steps.append(h)
        return torch.stack(steps, dim=1)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}"


def _check_model_inputs(d_model: int, a: torch.Tensor, b: torch.Tensor) -> None:
    if not isinstance(a, torch.Tensor):
        raise TypeError(f"a must be a torch tensor, got {type(a)}")
    if not isinstance(b, torch.Tensor):
        raise TypeError(f"b must be a torch tensor, got {type(b)}")
    shape = b.shape
    if a.shape != shape or len(shape) != 3 or shape[2] != d_model:
        raise ValueError(
            f"a and b must both have shape (B, L, {d_model}), "
            f"got {tuple(a.shape)} and {tuple(b.shape)}"
        )


_JAX_DTYPES = {
    torch.float32: jnp.float32,
    torch.bfloat16: jnp.bfloat16,
    torch.float16: jnp.float16,
    torch.float64: jnp.float64,
    torch.complex64: jnp.complex64,
    torch.complex128: jnp.complex128,
}
_NAMES = ", ".join(map(str, _JAX_DTYPES))
_WIDE = frozenset({torch.float64, torch.complex128})

# XLA wants its buffers at 64-byte boundaries on the CPU and at 16-byte ones on a GPU.
_ALIGNMENT = 64


# ---- JAX functions of tensors --------------------------------------------------------------------


class _Program:
    """A JAX function of arrays that returns a tuple of arrays, with what autograd asks of it.

    Here the derivative is that of ``jax.vjp``, which runs the function again. ``_ScanProgram`` has
    a better one. Programs are made by the cached functions below, so that equal options share one
    ``jax.jit``.
    """

    def __init__(self, function: Callable[..., tuple[jax.Array, ...]], wide: bool = False) -> None:
        self.function = function

        @functools.wraps(function)
        def own(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            # Arrays are never written to, so JAX may return an operand as a result, or one result
            # twice. Tensors are, and what a barrier returns has memory of its own.
            return lax.optimization_barrier(function(*arrays))

        # An operand that is not used is passed all the same: the first may stand for all (to_jax).
        self.compiled = jax.jit(own, keep_unused=True)
        self.wide = wide  # the result may be 64 bits wide though no operand is

    def save(self, ctx: Any, inputs: Sequence[torch.Tensor], outputs: tuple[Any, ...]) -> None:
        ctx.save_for_backward(*inputs)

    def pull_back(self, ctx: Any, cotangents: Sequence[torch.Tensor | None]) -> list[Any]:
        """The gradients of the inputs, None where they are not needed."""
        needed = tuple(ctx.needs_input_grad[1:])
        given = tuple(g is not None for g in cotangents)
        if not any(given) or not any(needed):
            return [None] * len(needed)
        program = _vjp_program(self, needed, given)
        gradients = _apply(program, [*ctx.saved_tensors, *(g for g in cotangents if g is not None)])
        return _scatter(gradients, needed)


class _ScanProgram(_Program):
    """The scan. Its backward pass is one cotangent call on a, h and h0; b is not kept."""

    def __init__(
        self,
        axis: int,
        reverse: bool,
        has_h0: bool,
        has_reset: bool,
        return_state: bool,
        out_dtype: torch.dtype | None,
    ) -> None:
        self.axis, self.reverse, self.has_h0, self.has_reset = axis, reverse, has_h0, has_reset
        self.names = ("a", "b", *["h0"] * has_h0, *["reset"] * has_reset)
        dtype = None if out_dtype is None else _JAX_DTYPES[out_dtype]

        def scan(a: jax.Array, b: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
            h0 = rest[0] if has_h0 else None
            reset = rest[-1] if has_reset else None
            result = _api.linear_scan(
                a,
                b,
                h0,
                axis=axis,
                reverse=reverse,
                reset=reset,
                return_state=return_state,
                out_dtype=dtype,
            )
            return result if isinstance(result, tuple) else (result,)

        super().__init__(scan, wide=out_dtype in _WIDE)

    def save(self, ctx: Any, inputs: Sequence[torch.Tensor], outputs: tuple[Any, ...]) -> None:
        a, b = inputs[:2]
        h0 = inputs[2] if self.has_h0 else None
        reset = inputs[-1] if self.has_reset else None
        # h is an operand of a's gradient only.
        ctx.save_for_backward(a, outputs[0] if ctx.needs_input_grad[1] else None, h0, reset)
        ctx.like = tuple(b.shape), b.dtype, outputs[0].dtype

    def pull_back(self, ctx: Any, cotangents: Sequence[torch.Tensor | None]) -> list[Any]:
        needed = dict(zip(self.names, ctx.needs_input_grad[1:], strict=True))
        wanted = tuple(f"d{name}" for name in ("a", "b", "h0") if needed.get(name))
        if not wanted or all(g is None for g in cotangents):
            return [None] * len(needed)
        a, h, h0, reset = ctx.saved_tensors
        if not needed["a"]:
            h = None
        g, gstate = cotangents[0], cotangents[1] if len(cotangents) > 1 else None
        operands = {"a": a, "h": h, "h0": h0, "reset": reset, "g": g, "gstate": gstate}
        operands = {name: x for name, x in operands.items() if x is not None}
        program = _cotangent_program(self.axis, self.reverse, tuple(operands), wanted, *ctx.like)
        gradients = dict(zip(wanted, _apply(program, list(operands.values())), strict=True))
        return [gradients.get(f"d{name}") for name in needed]


@functools.cache
def _scan_program(*options: Any) -> _ScanProgram:
    return _ScanProgram(*options)


# Bounded, since its key holds a shape.
@functools.lru_cache(maxsize=4096)
def _cotangent_program(
    axis: int,
    reverse: bool,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    b_shape: tuple[int, ...],
    b_dtype: torch.dtype,
    h_dtype: torch.dtype,
) -> _Program:
    """(a, h?, h0?, reset?, g?, gstate?) to the wanted ones of (da, db, dh0), in torch's convention.

    torch's gradients are the conjugates of JAX's cotangents. Conjugating a, h and h0 instead of g,
    da, db and dh0 gives the same and moves less.
    """
    rank, axis = len(b_shape), axis % len(b_shape)
    dtypes = {"db": np.dtype(_JAX_DTYPES[b_dtype])}

    def lifted(name: str, x: jax.Array) -> jax.Array:
        """With b's rank, as the primitives have it."""
        if name == "h0":
            return lax.expand_dims(x, (*range(rank - 1 - x.ndim), axis))
        if name == "reset":
            missing = range(axis + 1 - x.ndim)
            return lax.expand_dims(x, (*missing, *range(axis + 1, rank)))
        if name == "gstate":
            return lax.expand_dims(x, (axis,))
        return lax.expand_dims(x, range(rank - x.ndim))

    def cotangent(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = dict(zip(names, arrays, strict=True))
        state = _api._state_dtype(given["a"].dtype, dtypes["db"], _JAX_DTYPES[h_dtype])
        recurrence = _reference.Recurrence(axis, b_shape[axis], reverse, "h0" in given, state)
        operands = {name: lifted(name, x) for name, x in given.items()}
        results = [
            _primitives.Result(name, *of)
            for name, of in (
                ("da", (operands["a"].shape, given["a"].dtype)),
                ("db", (b_shape, dtypes["db"])),
                ("dh0", (operands["h0"].shape if "h0" in operands else (), state)),
            )
            if name in wanted
        ]
        for name in ("a", "h", "h0"):
            if name in operands:
                operands[name] = _conjugate(operands[name])
        if "h0" in operands:
            operands["h0"] = operands["h0"].astype(state)
        if "da" not in wanted:
            operands.pop("h0", None)  # it was here for its shape
        outs = _primitives.cotangent(recurrence, operands, results)
        like = {"da": given["a"], "dh0": given.get("h0")}
        return tuple(
            out if x is None else _reference.convert(out, x.dtype).reshape(x.shape)
            for out, x in zip(outs, (like.get(result.name) for result in results), strict=True)
        )

    return _Program(cotangent, wide=b_dtype in _WIDE)


@functools.cache
def _vjp_program(program: _Program, needed: tuple[bool, ...], given: tuple[bool, ...]) -> _Program:
    """(inputs, given cotangents) to the gradients of the needed inputs, in torch's convention."""

    def vjp(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        inputs = arrays[: len(needed)]
        cotangents = iter(arrays[len(needed) :])

        def of_needed(*chosen: jax.Array) -> tuple[jax.Array, ...]:
            chosen_ones = iter(chosen)
            full = [next(chosen_ones) if n else x for n, x in zip(needed, inputs, strict=True)]
            results = program.function(*full)
            return tuple(r for r, g in zip(results, given, strict=True) if g)

        _, pull_back = jax.vjp(of_needed, *(x for n, x in zip(needed, inputs, strict=True) if n))
        return tuple(map(_conjugate, pull_back(tuple(map(_conjugate, cotangents)))))

    return _Program(vjp, program.wide)


@functools.cache
def _jvp_program(program: _Program, moving: tuple[bool, ...]) -> _Program:
    """(inputs, tangents of the moving ones) to the tangents of the results."""

    def jvp(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        inputs, tangents = arrays[: len(moving)], arrays[len(moving) :]

        def of_moving(*chosen: jax.Array) -> tuple[jax.Array, ...]:
            chosen_ones = iter(chosen)
            return program.function(
                *(next(chosen_ones) if m else x for m, x in zip(moving, inputs, strict=True))
            )

        primals = tuple(x for m, x in zip(moving, inputs, strict=True) if m)
        return jax.jvp(of_moving, primals, tangents)[1]

    return _Program(jvp, program.wide)


@functools.cache
def _batched_program(program: _Program, axes: tuple[int | None, ...]) -> _Program:
    """The program mapped over an axis of each input, and over the first axis of each result."""
    return _Program(jax.vmap(program.function, in_axes=axes, out_axes=0), program.wide)


def _conjugate(x: Any) -> Any:
    return jnp.conj(x) if x is not None and jnp.iscomplexobj(x) else x


def _scatter(values: Sequence[Any], where: Sequence[bool]) -> list[Any]:
    remaining = iter(values)
    return [next(remaining) if w else None for w in where]


# ---- torch's side --------------------------------------------------------------------------------


class _Call(torch.autograd.Function):
    """Runs a program under autograd."""

    @staticmethod
    def forward(ctx: Any, program: _Program, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = _run(program, tensors)
        _set_up(ctx, program, tensors, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        return (None, *ctx.program.pull_back(ctx, cotangents))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        program = _jvp_program(ctx.program, tuple(t is not None for t in tangents))
        return _apply(program, [*ctx.saved_tensors, *(t for t in tangents if t is not None)])


class _TransformedCall(torch.autograd.Function):
    """The same inside torch.func's transforms, which ask for this form; it costs 20 us more."""

    @staticmethod
    def forward(program: _Program, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _run(program, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        program, *tensors = inputs
        _set_up(ctx, program, tensors, output)

    backward = staticmethod(_Call.backward)
    jvp = staticmethod(_Call.jvp)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], program: _Program, *tensors: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        results = _apply(_batched_program(program, tuple(in_dims[1:])), tensors)
        return results, (0,) * len(results)


def _set_up(
    ctx: Any, program: _Program, tensors: Sequence[torch.Tensor], outputs: tuple[torch.Tensor, ...]
) -> None:
    ctx.program = program
    ctx.set_materialize_grads(False)  # an absent cotangent is None: no work for it
    if _forward_level() >= 0:
        ctx.save_for_forward(*tensors)
    program.save(ctx, tensors, outputs)


def _forward_level() -> int:
    """The level of forward mode, -1 outside; inside, a plain call would lose a tangent."""
    return getattr(torch.autograd.forward_ad, "_current_level", 0)


# Inside torch.func's transforms tensors are wrapped and have no memory of their own. The public
# Function.apply asks the same function the same question.
_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def _apply(program: _Program, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if _transforms_active():
        return _TransformedCall.apply(program, *tensors)
    if _forward_level() >= 0 or (
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    ):
        return _Call.apply(program, *tensors)
    return _run(program, tensors)


def _run(program: _Program, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Tensors to JAX, one compiled call, and back."""
    device = tensors[0].device
    wide = program.wide
    plain = []  # held until the results are there: arrays may not do it
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(
                "linear_scan: all tensors must be on one device, got "
                + " and ".join(dict.fromkeys(str(t.device) for t in tensors))
            )
        wide = wide or tensor.dtype in _WIDE
        plain.append(_plain(tensor))
    bridge = _bridge(device)
    with jax.enable_x64(True) if wide else _NOTHING:
        arrays, stream = bridge.to_jax(plain)
        results = program.compiled(*arrays)
        return bridge.to_torch(results, stream)


_NOTHING = contextlib.nullcontext()


# ---- DLPack --------------------------------------------------------------------------------------

try:
    # What JAX's side of DLPack comes down to, without its checks in Python: 25 us for a tensor in
    # and 3 out. The same arguments from JAX 0.8 to 0.12.
    from jaxlib._jax import buffer_to_dlpack_managed_tensor as _export_capsule
    from jaxlib._jax import cuda_array_interface_to_buffer as _import_address
    from jaxlib._jax import dlpack_managed_tensor_to_buffer as _import_capsule
except ImportError:
    _import_capsule = None

    def _export_capsule(array: Any, stream: int | None) -> Any:
        return array.__dlpack__(stream=stream)


# What torch.from_dlpack does with a capsule after 2 us of Python.
_from_capsule: Callable[[Any], torch.Tensor] = getattr(torch._C, "_from_dlpack", torch.from_dlpack)


class _Exported:
    """What ``jax.dlpack.from_dlpack`` asks of a tensor, also of one that requires a gradient."""

    def __init__(
        self, tensor: torch.Tensor, device: tuple[Any, int], order: Callable[[int], None] | None
    ) -> None:
        self.tensor, self.device, self.order = tensor, device, order

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.device

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        if stream is not None and self.order is not None:
            self.order(stream)
        return torch.to_dlpack(self.tensor)


class _CpuBridge:
    """Tensors in host memory. torch computes before it returns, and so does this.

    JAX may still be computing when the compiled call returns, but hands out a result through DLPack
    only when it is there. Every program has at least one result, so that its operands have been
    read by then too.
    """

    def __init__(self, device: torch.device) -> None:
        probe = torch.zeros(16, device=device)
        self.device, self.dlpack_device = device, probe.__dlpack_device__()
        (self.jax_device,) = self.import_all([probe], None)[0].devices()

    def import_all(
        self, tensors: Sequence[torch.Tensor], order: Callable[[int], None] | None
    ) -> list[jax.Array]:
        return [jax.dlpack.from_dlpack(_Exported(t, self.dlpack_device, order)) for t in tensors]

    def to_jax(self, tensors: Sequence[torch.Tensor]) -> tuple[list[jax.Array], Any]:
        """The operands, and what `to_torch` has to know of the order of things."""
        if _import_capsule is None:
            return self.import_all(tensors, None), None
        return [_import_capsule(torch.to_dlpack(t), self.jax_device, None) for t in tensors], None

    def to_torch(self, arrays: Sequence[jax.Array], stream: Any) -> tuple[torch.Tensor, ...]:
        return tuple([_from_capsule(_export_capsule(array, None)) for array in arrays])


class _CudaBridge(_CpuBridge):
    """Tensors on a GPU: nothing waits on the host, all order is between streams.

    Towards JAX: a stream of JAX's, which it names itself, is made to wait for what is queued on
    torch's current stream; JAX starts the computation after what is queued on its stream. It does
    so if one operand is said to be made there: the computation waits for all of its operands.
    Back: the export is given torch's current stream, and makes it wait for the result. The operands
    have been read by then, so torch may write to them, or use their memory again, in the order of
    its stream. Therefore no array but the first has to keep its tensor, and one made for an address
    serves every later tensor at that address: an import takes 20 to 30 us of a queue. Such arrays
    stand in jax.live_arrays(), and are to be read by no one else: torch may have given their memory
    away.
    Freed results: JAX would give their memory to its next computation, and knows nothing of reads
    that torch has queued since. Each array is therefore held until its tensor's storage is gone,
    and from then on until torch has done what it had queued, or until the next call, before which
    JAX waits for torch in any case.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.streams: dict[int, tuple[int, torch.cuda.Stream, torch.cuda.Event]] = {}
        self.jax_stream = self.stream(self.jax_device.get_stream_for_external_ready_events())
        self.views: dict[tuple[int, torch.Size, torch.dtype], jax.Array] = {}
        # Other allocators of torch refuse record_stream for memory that is not theirs.
        self.keeps_addresses = torch.cuda.get_allocator_backend() == "native"
        self.legacy_stream = 0 if torch.version.hip else 1  # DLPack's name for the default stream
        self.live: dict[int, tuple[weakref.ref, jax.Array]] = {}
        self.freed: list[tuple[int, torch.cuda.Stream, jax.Array]] = []

    def to_jax(self, tensors: Sequence[torch.Tensor]) -> tuple[list[jax.Array], Any]:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("linear_scan: a torch CUDA graph cannot record a call into JAX")
        pointer, current, event = self.current()
        # Before the event: what is freed later may have reads behind it.
        freed, self.freed = self.freed, []
        event.record(current)
        if _import_capsule is None:
            arrays = self.import_all(tensors, lambda pointer: event.wait(self.stream(pointer)))
        else:
            event.wait(self.jax_stream)
            first, *others = tensors
            capsule, stream = torch.to_dlpack(first), self.jax_stream.cuda_stream
            arrays = [_import_capsule(capsule, self.jax_device, stream)]
            for tensor in others:
                if self.keeps_addresses:
                    tensor.record_stream(current)  # nothing, unless it was allocated on another
                    arrays.append(self.view(tensor))
                else:
                    capsule = torch.to_dlpack(tensor)
                    arrays.append(_import_capsule(capsule, self.jax_device, None))
        self.freed.extend([f for f in freed if f[0] != pointer and not f[1].query()])
        return arrays, pointer or self.legacy_stream

    def current(self) -> tuple[int, torch.cuda.Stream, torch.cuda.Event]:
        """torch's current stream and an event for it.

        A wait is for what the event stood for when it was queued, so one event does for all calls.
        """
        pointer = torch._C._cuda_getCurrentRawStream(self.index)
        found = self.streams.get(pointer)
        if found is None:
            stream, event = torch.cuda.current_stream(self.index), torch.cuda.Event()
            event.record(stream)  # which creates it, before other threads see it
            found = self.streams.setdefault(pointer, (pointer, stream, event))
        return found

    def view(self, tensor: torch.Tensor) -> jax.Array:
        """An array that reads the tensor's memory and does not keep it."""
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        array = self.views.get(key)
        if array is None or array.is_deleted():
            if len(self.views) >= 256:
                self.views.clear()
            interface = {
                "data": (key[0], False),
                "shape": tuple(key[1]),
                "typestr": np.dtype(_JAX_DTYPES.get(key[2], np.bool_)),
                "stream": 1,  # one of CUDA's own: no event of another is waited for
                "version": 3,
            }
            client, index = self.jax_device.client, self.jax_device.local_hardware_id
            array = self.views[key] = _import_address(interface, client, index)
        return array

    def stream(self, pointer: int) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(pointer, device=self.device)

    def to_torch(self, arrays: Sequence[jax.Array], stream: Any) -> tuple[torch.Tensor, ...]:
        tensors = []
        for array in arrays:
            tensor = _from_capsule(_export_capsule(array, stream))
            storage = weakref.ref(tensor.untyped_storage(), self.release)
            self.live[id(storage)] = storage, array
            tensors.append(tensor)
        return tuple(tensors)

    def release(self, storage: weakref.ref) -> None:
        _, array = self.live.pop(id(storage))
        pointer, stream, _ = self.current()
        if not stream.query():
            self.freed.append((pointer, stream, array))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy on its device where JAX could not read it in place."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"linear_scan: tensors must be strided, got layout {tensor.layout}")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


@functools.cache
def _bridge(device: torch.device) -> _CpuBridge:
    """The way to JAX and back for a device of torch's; a clear error where there is none."""
    if device.type not in ("cpu", "cuda"):
        raise RuntimeError(f"linear_scan: tensors on {device} cannot be handed to JAX")
    platform = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    try:
        jax.devices(platform)
    except RuntimeError as error:
        raise RuntimeError(
            f"linear_scan: tensors are on {device}, but this JAX has no {platform} devices "
            "(for NVIDIA GPUs: pip install 'jax[cuda13]'; "
            f"JAX_PLATFORMS must allow {platform}): {error}"
        ) from error
    return _CpuBridge(device) if device.type == "cpu" else _CudaBridge(device)
