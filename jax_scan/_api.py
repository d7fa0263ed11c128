"""The public functions: what they accept, and what they say when they do not."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike
from numpy.typing import DTypeLike

from jax_scan import _primitives
from jax_scan._primitives import DTYPES
from jax_scan._reference import Recurrence


@overload
def linear_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    axis: int = -2,
    reverse: bool = False,
    reset: ArrayLike | None = None,
    return_state: Literal[False] = False,
    out_dtype: DTypeLike | None = None,
) -> jax.Array: ...
@overload
def linear_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    axis: int = -2,
    reverse: bool = False,
    reset: ArrayLike | None = None,
    return_state: Literal[True],
    out_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def linear_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    axis: int = -2,
    reverse: bool = False,
    reset: ArrayLike | None = None,
    return_state: bool,
    out_dtype: DTypeLike | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def linear_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    axis: int = -2,
    reverse: bool = False,
    reset: ArrayLike | None = None,
    return_state: bool = False,
    out_dtype: DTypeLike | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Runs h[t] = a[t] h[t-1] + b[t] along one axis, each channel (every other index) on its own.

    Before the first step h is `h0`. Without it the first output is b[0], whatever a[0] holds. The
    function can be differentiated any number of times in both modes with respect to `a`, `b` and
    `h0`, and mapped with `jax.vmap`; nothing is broadcast, transposed or copied on the way (but for
    calls that XLA splits over CPU devices: docs/sharding.md). A plain call reads `a` and `b` once
    and writes h once; its gradient reads a, h and the cotangent once and writes the gradients of a
    and b once.

    Values are those of the loop from step to step, NaNs and infinities included, up to rounding; a
    product of factors that underflows may count as zero.

    Args:
        a: The factors. Real or complex, of b's shape or broadcastable to it by NumPy's rules; a
            Python number will do. Its gradient has its own shape.
        b: The terms, of any rank from 1 up.
        h0: The state before the first step, of b's shape without the time axis or broadcastable to
            it; a Python number will do. It is converted to the dtype of the state.
        axis: The time axis of b, by default the last but one, as in (batch, time, channels). With a
            b of rank 1 say `axis=-1`.
        reverse: Run from the end: h[t] = a[t] h[t+1] + b[t], and `h0` enters at the last index.
        reset: Booleans, true where a new segment starts: there h[t] = b[t], a[t] is not read, and
            neither values nor gradients pass. Of the shape of b's axes up to and including time, or
            broadcastable to it.
        return_state: Also return h after the last step (the first index if `reverse`).
        out_dtype: The dtype of h. By default what JAX's promotion makes of a and b.

    Returns:
        h, of b's shape. With `return_state` the pair of h and the last state, which has b's shape
        without the time axis and the dtype of the state. If the time axis is empty, so is h, and
        the state is `h0`, or zero.

    The dtypes are bfloat16, float16, float32, float64, complex64 and complex128, and `a` and `b`
    may differ: each is read as it is. The state is held in the least precise of the last four that
    holds a, b and h, so for 16-bit data in float32, and is rounded to the dtype of h only when it
    is stored. For complex arguments gradients follow JAX's convention (without conjugation), as
    those of any other JAX function. On the CPU subnormal numbers count as zero, as in all that XLA
    runs there.

    Raises:
        TypeError: An argument is of the wrong kind: not an array, of a dtype that is not listed,
            complex where the result is real, or traced where it must be static.
        ValueError: Shapes do not fit, or `axis` is out of range.

    >>> linear_scan(0.5, jax.numpy.ones(4), axis=-1)
    Array([1.   , 1.5  , 1.75 , 1.875], dtype=float32)
    """
    options = (axis, reverse, reset, return_state, out_dtype)
    return checked(_primitives.scan, a, b, h0, *options)


def checked(
    scan: Any, a: Any, b: Any, h0: Any, axis, reverse, reset, return_state, out_dtype
) -> Any:
    """Checks the arguments of `linear_scan` and runs `scan` on them, with b's rank for all."""
    a, b = _array("a", a), _array("b", b)
    axis = _axis(axis, b)
    reverse = _flag("reverse", reverse)
    return_state = _flag("return_state", return_state)
    a_type, b_type = jax.typeof(a), jax.typeof(b)

    dtype = jnp.result_type(a, b) if out_dtype is None else _out_dtype(out_dtype)
    if not _is_complex(dtype) and (_is_complex(a.dtype) or _is_complex(b.dtype)):
        raise TypeError(f"out_dtype is {dtype}, but a ({a.dtype}) and b ({b.dtype}) make h complex")
    # A weakly typed operand (one made of Python numbers) adapts, as elsewhere in JAX, but is never
    # rounded to 16 bits.
    state = _state_dtype(dtype, *(x.dtype for x in (a_type, b_type) if not x.weak_type))
    a, b = _strong(a, state), _strong(b, state)

    every = range(b.ndim)
    operands = {"a": _align("a", a, b, every, "b's shape"), "b": b}
    if h0 is not None:
        h0 = _array("h0", h0)
        if _is_complex(h0.dtype) and not _is_complex(state):
            raise TypeError(
                f"h0 is {h0.dtype}, but a ({a.dtype}) and b ({b.dtype}) make the state {state}"
            )
        h0 = lax.convert_element_type(h0, state)
        others = [k for k in every if k != axis]
        operands["h0"] = _align("h0", h0, b, others, "b's shape without the time axis")
    if reset is not None:
        reset = _reset(reset)
        operands["reset"] = _align(
            "reset", reset, b, every[: axis + 1], "b's shape up to and including time"
        )

    if not isinstance(b.shape[axis], int):
        raise ValueError(f"the length of the time axis must be known, got {b.shape[axis]}")
    recurrence = Recurrence(axis, b.shape[axis], reverse, h0 is not None, state)
    h, last = scan(recurrence, operands, dtype, return_state)
    return h if last is None else (h, lax.squeeze(last, (axis,)))


def save_scans(policy: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A policy for `jax.checkpoint` that keeps the results of scans: none of them is run again.

    A gradient keeps h then, one array per scan. A name that `checkpoint_name` gives to h does not
    keep it, since what the gradient reads is the result of the scan itself.

    Args:
        policy: Decides about everything else: one of `jax.checkpoint_policies`, those that offload
            included, or a function of the same kind. By default all else is computed again.

    Raises:
        TypeError: `policy` is not a function.

    >>> layer = jax.checkpoint(lambda a, b: linear_scan(a, jax.numpy.tanh(b)), policy=save_scans())
    """
    if policy is not None and not callable(policy):
        raise TypeError(
            f"policy must be a function as in jax.checkpoint_policies, got {_kind(policy)}"
        )
    return _SaveScans(policy)


@dataclass(frozen=True)
class _SaveScans:
    """Equal where its inner policies are, so that JAX's caches see the same policy again."""

    policy: Callable[..., Any] | None

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive in _primitives.PRIMITIVES:
            return True
        return self.policy is not None and self.policy(primitive, *avals, **params)


def _array(name: str, x: Any) -> jax.Array:
    """`x` as a JAX array of a supported dtype."""
    if isinstance(x, (int, float, complex)) and not isinstance(x, (bool, np.generic)):
        try:
            return jnp.asarray(x if isinstance(x, complex) else float(x))
        except OverflowError:
            raise ValueError(f"{name} is an int beyond the range of float64") from None
    known = isinstance(x, (jax.Array, np.ndarray, np.generic)) or hasattr(x, "__jax_array__")
    if not known or isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a JAX or NumPy array or a Python number, got {_kind(x)}")
    if isinstance(x, (np.ndarray, np.generic)):
        _check_dtype(name, x.dtype)  # before JAX makes of it what it can hold
    if not isinstance(x, jax.Array):
        x = jnp.asarray(x)
    _check_dtype(name, x.dtype)
    return x


def _check_dtype(name: str, dtype: Any) -> None:
    if dtype not in DTYPES:
        names = ", ".join(t.name for t in DTYPES)
        raise TypeError(f"{name} must have one of the dtypes {names}, got {dtype}")


def _reset(reset: Any) -> jax.Array:
    if not isinstance(reset, (bool, jax.Array, np.ndarray, np.generic)):
        raise TypeError(f"reset must be a boolean array, got {_kind(reset)}")
    reset = jnp.asarray(reset)
    if reset.dtype != np.bool_:
        raise TypeError(f"reset must have dtype bool, got {reset.dtype}")
    return reset


def _axis(axis: Any, b: Any) -> int:
    """The time axis of `b`, JAX's or torch's, counted from the front."""
    if isinstance(axis, (bool, Tracer)):
        raise TypeError(f"axis must be an int, got {_kind(axis)}")
    try:
        axis = operator.index(axis)
    except TypeError:
        raise TypeError(f"axis must be an int, got {_kind(axis)}") from None
    rank = b.ndim
    if rank == 0:
        raise ValueError("b must have a time axis, got a scalar")
    if not -rank <= axis < rank:
        hint = "; with a b of rank 1 time is axis=-1" if rank == 1 else ""
        raise ValueError(f"axis {axis} is out of range for b of shape {b.shape}{hint}")
    return axis % rank


def _flag(name: str, x: Any) -> bool:
    if x is True or x is False:
        return x
    if not isinstance(x, np.bool_):
        raise TypeError(f"{name} must be True or False, got {_kind(x)}")
    return bool(x)


def _out_dtype(dtype: Any) -> np.dtype:
    if isinstance(dtype, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(f"out_dtype must be a dtype, got an array of dtype {dtype.dtype}")
    try:
        found = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        found = dtype
    _check_dtype("out_dtype", found)
    return found


def _state_dtype(*dtypes: Any) -> np.dtype:
    """The least of float32, float64, complex64 and complex128 that holds all of `dtypes`."""
    double = any(t in (np.float64, np.complex128) for t in dtypes)
    if any(map(_is_complex, dtypes)):
        return np.dtype(np.complex128 if double else np.complex64)
    return np.dtype(np.float64 if double else np.float32)


def _strong(x: jax.Array, state: np.dtype) -> jax.Array:
    if not jax.typeof(x).weak_type:
        return x
    real = np.dtype(np.float64 if state in (np.float64, np.complex128) else np.float32)
    return lax.convert_element_type(x, state if _is_complex(x.dtype) else real)


def _align(name: str, x: jax.Array, b: jax.Array, axes: Sequence[int], what: str) -> jax.Array:
    """`x`, which broadcasts to these axes of b, with b's rank: size 1 in all others."""
    target = tuple(b.shape[k] for k in axes)
    own = axes[len(axes) - x.ndim :] if x.ndim else ()
    if x.ndim > len(axes) or any(
        n not in (1, b.shape[k]) for n, k in zip(x.shape, own, strict=True)
    ):
        raise ValueError(f"{name} of shape {x.shape} does not broadcast to {what}, {target}")
    missing = [k for k in range(b.ndim) if k not in own]
    # Even an expansion by nothing would move a mapped axis to the front.
    return lax.expand_dims(x, missing) if missing else x


def _is_complex(dtype: Any) -> bool:
    return np.issubdtype(dtype, np.complexfloating)


_SHORT = reprlib.Repr()  # a list may be long
_SHORT.maxother = 100


def _kind(x: Any) -> str:
    if isinstance(x, Tracer):
        return f"a value traced by JAX ({jax.typeof(x).str_short()}); it must be static"
    if type(x).__module__.split(".")[0] == "torch":
        return f"a torch {type(x).__name__}; jax_scan.torch.linear_scan takes those"
    if isinstance(x, np.ma.MaskedArray):
        return "a masked array; x.filled(...) makes a plain one"
    return "None" if x is None else f"{_SHORT.repr(x)} of type {type(x).__name__}"
