"""The recurrence and its derivatives as NumPy loops in double precision, with bounds on errors.

A bound holds for any implementation that keeps the promised state dtype.
Nothing here uses JAX. Let u be half an ulp of 1 in the state's dtype, and H the scan of the
absolute values |a|, |b| and |h0|. However the steps are grouped, h_t is a sum of terms a_t ...
a_{s+1} b_s; each goes through at most t - s multiplications and t - s + 1 additions that matter to
it, so the error is at most

    E_t = |a_t| E_prev + c u H_t

which is a scan again. c is 2 for real numbers and 4 for complex ones, whose product has a relative
error of sqrt(5) u. Storing rounds once more, by half an ulp of the stored dtype. The bounds below
follow from these by the rules for products and sums.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

# Half an ulp of 1: what a correctly rounded operation may be off by, relatively.
HALF_ULP = {
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float32": 2.0**-24,
    "float64": 2.0**-53,
    "complex64": 2.0**-24,
    "complex128": 2.0**-53,
}
ROUNDINGS = {"float32": 2, "float64": 2, "complex64": 4, "complex128": 4}


class Expected(NamedTuple):
    value: np.ndarray
    bound: np.ndarray


def state_dtype(*dtypes) -> str:
    """The table of the documentation, written out once more."""
    names = {np.dtype(t).name for t in dtypes}
    wide = bool(names & {"float64", "complex128"})
    if names & {"complex64", "complex128"}:
        return "complex128" if wide else "complex64"
    return "float64" if wide else "float32"


def check(actual, expected: Expected, what: str = "") -> None:
    """Every element is within its bound; infinities and NaNs are where they should be."""
    actual = np.asarray(actual)
    assert actual.shape == expected.value.shape, (what, actual.shape, expected.value.shape)
    info = ml_dtypes.finfo(actual.dtype)
    actual = actual.astype(np.complex128 if np.iscomplexobj(actual) else np.float64)
    finite = np.isfinite(expected.value)
    assert np.array_equal(np.isnan(actual), np.isnan(expected.value)), f"{what}: NaNs differ"
    both = ~finite & ~np.isnan(expected.value)
    assert np.array_equal(actual[both], expected.value[both]), f"{what}: infinities differ"
    error = np.abs(actual[finite] - expected.value[finite])
    bound = expected.bound[finite]
    parts = np.sqrt(2) if np.iscomplexobj(actual) else 1
    bound = bound + parts * _half_ulp(np.abs(expected.value[finite]) + bound, info)
    worse = error > bound
    if worse.any():
        at = tuple(int(k) for k in np.argwhere(finite)[np.argmax(error / bound)])
        raise AssertionError(
            f"{what}: {int(worse.sum())} of {worse.size} elements off, at worst "
            f"{np.max(error / bound):.3g} times the bound, at {at}: got {actual[at]}, expected "
            f"{expected.value[at]} +- {expected.bound[at]:.3g}"
        )


def same(actual, expected) -> None:
    """Two results of the package agree, although they may have grouped the steps differently.

    With the factors of `cases.arguments` a term lives for a dozen steps of two roundings each, and
    sums of absolute values are a few times larger than results: 256 half ulps are ample.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    half_ulp = HALF_ULP[actual.dtype.name]
    scale = np.abs(expected).max(initial=0, where=np.isfinite(expected))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=256 * half_ulp * float(scale))


def _half_ulp(x, info):
    """The error of storing a real number of at most this size."""
    _, exponent = np.frexp(np.maximum(x, float(info.smallest_normal)))
    return np.ldexp(float(info.eps) / 2, exponent - 1)


class Oracle:
    """All that is expected of one scan. Arguments as those of `linear_scan`, with NumPy arrays."""

    def __init__(
        self, a, b, h0=None, *, axis=-2, reverse=False, reset=None, out_dtype=None, state=None
    ):
        a, b = np.asarray(a), np.asarray(b)
        self.axis = axis % b.ndim
        self.reverse = reverse
        self.given = {"a": a, "b": b, "h0": None if h0 is None else np.asarray(h0)}
        self.dtype = np.dtype(out_dtype or np.result_type(a, b))
        self.state = state or state_dtype(a.dtype, b.dtype, self.dtype)
        self.unit = HALF_ULP[self.state]
        self.roundings = ROUNDINGS[self.state]

        self.full = b.shape
        self.length = b.shape[self.axis]
        self.step = (*b.shape[: self.axis], *b.shape[self.axis + 1 :])
        self.a, self.b = self._front(a), self._front(b)
        self.h0 = None if h0 is None else np.broadcast_to(_wide(h0), self.step)
        cut = np.zeros(self.full, bool)
        if reset is not None:
            leading = np.broadcast_to(reset, b.shape[: self.axis + 1])
            cut |= leading.reshape(leading.shape + (1,) * (b.ndim - self.axis - 1))
        self.cut = np.moveaxis(cut, self.axis, 0).copy()
        if reverse:
            self.cut = self.cut[::-1]
        if h0 is None and self.length:
            self.cut[0] = True

        self.h, self.last = self._scan(self.a, self.b, self.h0)
        self.size, self.last_size = self._scan(*map(_abs, (self.a, self.b, self.h0)))
        self.error, self.last_error = self._error(self.size, self.last_size)
        rounding = HALF_ULP.get(self.dtype.name, 0.0)
        self.stored_error = self.error + rounding * np.abs(self.h)

    # Everything inside has scan order on the first axis.
    def _front(self, x):
        x = np.broadcast_to(_wide(x), self.full)
        x = np.moveaxis(x, self.axis, 0)
        return x[::-1] if self.reverse else x

    def _back(self, x):
        return np.moveaxis(x[::-1] if self.reverse else x, 0, self.axis)

    def _scan(self, a, b, h0):
        h = np.zeros(b.shape, np.result_type(a, b, b if h0 is None else h0))
        state = np.zeros(self.step, h.dtype) if h0 is None else h0.astype(h.dtype)
        with np.errstate(all="ignore"):
            for t in range(self.length):
                h[t] = state = np.where(self.cut[t], b[t], a[t] * state + b[t])
        return h, state

    def _error(self, size, last_size, extra=None):
        own = self.roundings * self.unit * size
        error, last = self._scan(np.abs(self.a), own if extra is None else own + extra, None)
        return error, last

    def _previous(self, x, initial):
        out = np.zeros_like(x)
        out[1:] = x[:-1]
        if initial is not None and self.length:
            out[0] = initial
        return out

    def values(self) -> tuple[Expected, Expected]:
        """h and the last state."""
        return Expected(self._back(self.h), self._back(self.error)), Expected(
            self.last, self.last_error
        )

    def tangents(self, da=None, db=None, dh0=None) -> tuple[Expected, Expected]:
        """The tangents of h and of the last state."""
        x = np.zeros(self.a.shape)
        size, inexact = np.zeros(self.a.shape), np.zeros(self.a.shape)
        if da is not None:
            da = np.where(self.cut, 0, self._front(da))
            x = x + da * self._previous(self.h, self.h0)
            size = size + np.abs(da) * self._previous(self.size, _abs(self.h0))
            inexact = inexact + np.abs(da) * self._previous(self.stored_error, None)
        if db is not None:
            x, size = x + self._front(db), size + np.abs(self._front(db))
        inexact = inexact + self.roundings * self.unit * size
        dh0 = None if dh0 is None else np.broadcast_to(_wide(dh0), self.step)
        dh, dlast = self._scan(self.a, x, dh0)
        size, last_size = self._scan(np.abs(self.a), size, _abs(dh0))
        error, last_error = self._error(size, last_size, inexact)
        return Expected(self._back(dh), self._back(error)), Expected(dlast, last_error)

    def cotangents(self, g=None, gstate=None) -> dict[str, Expected]:
        """The cotangents of a, b and (if there is one) h0, in their shapes."""
        g = np.zeros(self.a.shape) if g is None else self._front(g)
        v = np.zeros(self.step) if gstate is None else _wide(gstate)
        wide = np.result_type(self.a, g, v)
        v, v_size, v_error = v.astype(wide), np.abs(v), np.zeros(self.step)
        u = np.zeros(self.a.shape, wide)
        size, error = np.zeros(self.a.shape), np.zeros(self.a.shape)
        rounding = self.roundings * self.unit
        with np.errstate(all="ignore"):
            for t in reversed(range(self.length)):
                u[t], size[t] = g[t] + v, np.abs(g[t]) + v_size
                error[t] = v_error + rounding * size[t]
                cut, a = self.cut[t], self.a[t]
                v = np.where(cut, 0, a * u[t])
                v_size = np.where(cut, 0, np.abs(a) * size[t])
                v_error = np.where(cut, 0, np.abs(a) * (error[t] + rounding * size[t]))
            h, h_size = self._previous(self.h, self.h0), self._previous(self.size, _abs(self.h0))
            h_error = self._previous(self.stored_error, None)
            da = np.where(self.cut, 0, u * h)
            da_size = np.where(self.cut, 0, size * h_size)
            da_error = np.where(
                self.cut, 0, error * h_size + size * h_error + rounding * size * h_size
            )
        out = {
            "a": self._sum("a", *map(self._back, (da, da_size, da_error))),
            "b": self._sum("b", *map(self._back, (u, size, error))),
        }
        if self.h0 is not None:
            out["h0"] = self._sum("h0", v, v_size, v_error)
        return out

    def _sum(self, name, value, size, error) -> Expected:
        """Summed to the shape of an argument, in any order; of a real argument the real part."""
        shape = self.given[name].shape
        value = value if np.iscomplexobj(self.given[name]) else np.real(value)
        lead = value.ndim - len(shape)
        axes = (
            *range(lead),
            *(k + lead for k, n in enumerate(shape) if n != value.shape[k + lead]),
        )
        count = np.prod([value.shape[k] for k in axes], dtype=float) if axes else 0.0
        total = [x.sum(axes, keepdims=True).reshape(shape) for x in (value, size, error)]
        return Expected(total[0], total[2] + count * self.unit * total[1])


def _wide(x):
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _abs(x):
    return None if x is None else np.abs(x)
