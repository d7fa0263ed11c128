"""The recurrence and its derivatives as NumPy loops in double precision, with bounds on errors.

A bound holds for any implementation that keeps the promised state dtype.
Nothing here uses JAX. Let u be half an ulp of 1 in the state's dtype, and H the scan of the
absolute values |a|, |b| and |h0|. However the steps are grouped, h_t is a sum of terms a_t ...
a_{s+1} b_s; each goes through at most t - s multiplications and t - s + 1 additions that matter to
it, so the error is at most

    E_t = |a_t| E_prev + c u H_t

which is a scan again. c is 2 for real numbers and 4 for complex ones, whose product has a relative
error of sqrt(5) u. Storing rounds once more, by half an ulp of the stored dtype. The bounds below
follow from these by the rules for products and sums. Numbers below the smallest normal one, n, may
count as zero, products of factors included: each step adds n (2 + the largest H of its segment).

Each size, such as H, is also what certainty rests on: while it stays far from the largest number of
the dtype, nothing on the way to the value overflows, however the steps are grouped.
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
    size: np.ndarray | None = None  # the sum of the absolute values of the terms


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
    size = np.abs(expected.value[finite]) + bound
    bound = bound + parts * _half_ulp(size, info)
    if info.bits == 16:  # double precision gets there by way of single precision
        bound = bound + 2.0**-24 * size
    worse = error > bound
    if worse.any():
        at = tuple(int(k) for k in np.argwhere(finite)[np.argmax(error / bound)])
        raise AssertionError(
            f"{what}: {int(worse.sum())} of {worse.size} elements off, at worst "
            f"{np.max(error / bound):.3g} times the bound, at {at}: got {actual[at]}, expected "
            f"{expected.value[at]} +- {expected.bound[at]:.3g}"
        )


def check_finite(actual, expected: Expected, what: str = "") -> int:
    """Elements on the way to which nothing can overflow are finite and within their bounds.

    Others may be anything. Returns how many there are of the former.
    """
    assert expected.size is not None
    actual = np.asarray(actual)
    assert actual.shape == expected.value.shape, (what, actual.shape, expected.value.shape)
    certain = expected.size < _limit(actual.dtype) / 8
    check(actual[certain], Expected(expected.value[certain], expected.bound[certain]), what)
    return int(certain.sum())


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
        self, a, b, h0=None, *, axis=-2, reverse=False, reset=None, out_dtype=None, state=None,
        shape=None,
    ):  # fmt: skip
        a, b = np.asarray(a), np.asarray(b)
        # b may broadcast too, as where a scan is mapped over its other arguments.
        self.full = b.shape if shape is None else tuple(shape)
        self.axis = axis % len(self.full)
        self.reverse = reverse
        self.given = {"a": a, "b": b, "h0": None if h0 is None else np.asarray(h0)}
        self.dtype = np.dtype(out_dtype or np.result_type(a, b))
        self.state = state or state_dtype(a.dtype, b.dtype, self.dtype)
        self.unit = HALF_ULP[self.state]
        self.roundings = ROUNDINGS[self.state]

        # Single precision on the way, as that of bfloat16 data, has subnormal numbers of its own.
        arrays = [x for x in self.given.values() if x is not None]
        known = {self.state, self.dtype.name, *(x.dtype.name for x in arrays)}
        self.tiny = 2.0**-1022 if known <= {"float64", "complex128", "float16"} else 2.0**-126

        self.length = self.full[self.axis]
        self.step = (*self.full[: self.axis], *self.full[self.axis + 1 :])
        self.a, self.b = self._front(a), self._front(b)
        self.h0 = None if h0 is None else np.broadcast_to(_wide(h0), self.step)
        cut = np.zeros(self.full, bool)
        if reset is not None:
            leading = np.broadcast_to(reset, self.full[: self.axis + 1])
            cut |= leading.reshape(leading.shape + (1,) * (len(self.full) - self.axis - 1))
        self.cut = np.moveaxis(cut, self.axis, 0).copy()
        if reverse:
            self.cut = self.cut[::-1]
        if h0 is None and self.length:
            self.cut[0] = True

        self.h, self.last = self._scan(self.a, self.b, self.h0)
        self.size, self.last_size = self._scan_sizes(*map(_abs, (self.a, self.b, self.h0)))
        self.error, self.last_error = self._error(self.size, self.h0)
        rounding = HALF_ULP.get(self.dtype.name, 0.0)
        least = float(ml_dtypes.finfo(self.dtype).smallest_subnormal)
        self.stored_error = self.error + rounding * np.abs(self.h) + self.tiny + least
        self.stored_size = self._kept(self.size)

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

    def _scan_sizes(self, a, x, initial):
        """As `_scan` of absolute values; what may overflow is infinite."""
        size = np.zeros(self.a.shape)
        # A tangent of h0 may be of a wider dtype, and is rounded to the state's.
        most = np.zeros(self.step) if initial is None else self._saturated(initial)
        with np.errstate(all="ignore"):
            for t in range(self.length):
                most = self._saturated(np.where(self.cut[t], x[t], a[t] * most + x[t]))
                size[t] = most
        return size, most

    def _kept(self, size):
        """Of what is stored in h's dtype; infinite where that may overflow."""
        return np.where(size < _limit(self.dtype) / 8, size, np.inf)

    def _saturated(self, size):
        return np.where(size < _limit(self.state) / 8, size, np.inf)

    def _error(self, size, initial, extra=None):
        own = self.roundings * self.unit * size + self._underflow(size, initial)
        own = own if extra is None else own + extra
        return self._scan(np.abs(self.a), own, np.full(self.step, self.tiny))

    def _underflow(self, size, initial):
        """What each step may lose by numbers that count as zero."""
        most = np.zeros(self.step) if initial is None else np.abs(initial)
        largest = np.zeros(size.shape)
        for t in range(self.length):
            most = np.where(self.cut[t], size[t], np.fmax(most, size[t]))
            largest[t] = most
        # A complex product has two real ones in each part, of which each may lose as much.
        return self.tiny * (2 + largest) * (1 if self.roundings == 2 else 8**0.5)

    def _previous(self, x, initial):
        out = np.zeros_like(x)
        out[1:] = x[:-1]
        if initial is not None and self.length:
            out[0] = initial
        return out

    def values(self) -> tuple[Expected, Expected]:
        """h and the last state."""
        return Expected(
            self._back(self.h), self._back(self.error), self._back(self.size)
        ), Expected(self.last, self.last_error, self.last_size)

    def tangents(self, da=None, db=None, dh0=None) -> tuple[Expected, Expected]:
        """The tangents of h and of the last state."""
        x = np.zeros(self.a.shape)
        size, inexact = np.zeros(self.a.shape), np.zeros(self.a.shape)
        if da is not None:
            da = np.where(self.cut, 0, self._front(da))
            x = x + da * self._previous(self.h, self.h0)
            size = size + np.abs(da) * self._previous(self.stored_size, _abs(self.h0))
            inexact = inexact + np.abs(da) * self._previous(self.stored_error, self.tiny)
            inexact = inexact + self.tiny * self._previous(self.stored_size, _abs(self.h0))
        if db is not None:
            x, size = x + self._front(db), size + np.abs(self._front(db))
        inexact = inexact + self.roundings * self.unit * size
        dh0 = None if dh0 is None else np.broadcast_to(_wide(dh0), self.step)
        dh, dlast = self._scan(self.a, x, dh0)
        size, last_size = self._scan_sizes(np.abs(self.a), size, _abs(dh0))
        error, last_error = self._error(size, dh0, inexact)
        return Expected(self._back(dh), self._back(error), self._back(size)), Expected(
            dlast, last_error, last_size
        )

    def cotangents(self, g=None, gstate=None) -> dict[str, Expected]:
        """The cotangents of a, b and (if there is one) h0, in their shapes."""
        g = np.zeros(self.a.shape) if g is None else self._front(g)
        v = np.zeros(self.step) if gstate is None else _wide(gstate)
        wide = np.result_type(self.a, g, v)
        v, v_size, v_error = v.astype(wide), np.abs(v), np.full(self.step, self.tiny)
        largest = v_size
        u = np.zeros(self.a.shape, wide)
        size, error = np.zeros(self.a.shape), np.zeros(self.a.shape)
        rounding = self.roundings * self.unit
        with np.errstate(all="ignore"):
            for t in reversed(range(self.length)):
                u[t], size[t] = g[t] + v, self._saturated(np.abs(g[t]) + v_size)
                largest = np.fmax(largest, size[t])
                error[t] = v_error + rounding * size[t] + 2 * self.tiny
                cut, a = self.cut[t], self.a[t]
                v = np.where(cut, 0, a * u[t])
                v_size = np.where(cut, 0, self._saturated(np.abs(a) * size[t]))
                # A factor that counts as zero loses n u, and v may be a result itself, dh0.
                lost = rounding * size[t]
                v_error = np.abs(a) * (error[t] + lost) + self.tiny * (1 + largest)
                v_error = np.where(cut, 0, v_error)
                largest = np.where(cut, 0, largest)
            h, h_error = (
                self._previous(self.h, self.h0),
                self._previous(self.stored_error, self.tiny),
            )
            h_size = self._previous(self.stored_size, _abs(self.h0))
            da = np.where(self.cut, 0, u * h)
            da_size = np.where(self.cut, 0, size * h_size)
            da_error = error * h_size + size * h_error + rounding * size * h_size + self.tiny
            da_error = np.where(self.cut, 0, da_error)
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
        error = total[2] + count * self.unit * total[1] + (count + 1) * self.tiny
        return Expected(total[0], error, total[1])

    # The second order. Here a bound is so many roundings of the size: of each step, forward,
    # backward and once more, and of what is stored between.

    def tangents_of_cotangents(
        self, g, gstate, da=None, db=None, dh0=None, *, order
    ) -> dict[str, Expected]:
        """The tangents of the cotangents of a, b and h0, along da, db and dh0.

            u'_t = v'_next,  v'_t = da_t u_t + a_t u'_t,
            (da_t)' = u'_t h_prev + u_t h'_prev,  (db_t)' = u'_t,  (dh0)' = v' at the first step

        Second derivatives are symmetric, so these are the cotangents of a, b and h0 that belong to
        the cotangents da, db and dh0 of the gradients too, or to g and gstate of the tangents. In
        that order they are FR, RR and RF. What lies between the two derivatives has h's dtype: h,
        and its tangent unless that is RR, and unless that is FR its cotangent da_t u_t, since JAX's
        cotangents have the dtype of what they belong to. In float16 these may overflow.
        """

        def run(of):
            a, h, dh, d, h0 = self._first_order(of, da, db, dh0)
            if of is np.abs and order != "RR":
                dh = self._kept(dh)
            kept = self._kept if of is np.abs and order != "FR" else _same
            v = of(_wide(gstate)) + np.zeros(self.step)
            dv = np.zeros(self.step)
            u, du = (np.zeros(self.a.shape, np.result_type(a, v, h)) for _ in range(2))
            for t in reversed(range(self.length)):
                u[t], du[t] = of(self._front(g))[t] + v, dv
                v = np.where(self.cut[t], 0, a[t] * u[t])
                dv = np.where(self.cut[t], 0, kept(d[t] * u[t]) + a[t] * du[t])
            h, dh = self._previous(h, h0), self._previous(dh, self._initial(of, dh0))
            return {"a": np.where(self.cut, 0, du * h + u * dh), "b": du, "h0": dv}

        values, sizes = run(_same), run(np.abs)
        out = {}
        for name, given in self.given.items():
            if given is not None:
                back = _same if name == "h0" else self._back
                size = back(sizes[name])
                out[name] = self._sum(name, back(values[name]), size, self._second_error(size))
        return out

    def tangents_of_tangents(self, first, second) -> tuple[Expected, Expected]:
        """The tangents along `second` of those along `first`, each a dict of da, db and dh0.

        h''_t = a_t h''_prev + (da1_t h2'_prev + da2_t h1'_prev)
        """

        def run(of):
            a, _, dh1, d1, _ = self._first_order(of, **first)
            dh2, d2 = self._first_order(of, **second)[2:4]
            if of is np.abs:
                dh1, dh2 = self._kept(dh1), self._kept(dh2)
            x = d1 * self._previous(dh2, self._initial(of, second.get("dh0")))
            x = x + d2 * self._previous(dh1, self._initial(of, first.get("dh0")))
            return self._scan(a, np.where(self.cut, 0, x), None)

        (h, last), (size, last_size) = run(_same), run(np.abs)
        return Expected(self._back(h), self._back(self._second_error(size)), self._back(size)), (
            Expected(last, self._second_error(last_size), last_size)
        )

    def _first_order(self, of, da=None, db=None, dh0=None):
        """a, h, its tangent, da where it counts, and h0."""
        a, h0 = of(self.a), None if self.h0 is None else of(self.h0)
        h, _ = self._scan(a, of(self.b), h0)
        d = np.zeros(self.a.shape) if da is None else np.where(self.cut, 0, of(self._front(da)))
        x = d * self._previous(h, h0)
        x = x if db is None else x + of(self._front(db))
        dh, _ = self._scan(a, x, self._initial(of, dh0))
        if of is np.abs:
            h = self._kept(h)
        return a, h, dh, d, h0

    def _initial(self, of, dh0):
        return None if dh0 is None else of(np.broadcast_to(_wide(dh0), self.step))

    def _second_error(self, size):
        stored = [self.dtype, *(x.dtype for x in self.given.values() if x is not None)]
        coarse = max(HALF_ULP[np.dtype(t).name] for t in stored)
        small = max(float(ml_dtypes.finfo(t).smallest_subnormal) for t in stored)
        roundings = 3 * self.roundings * (self.length + 2) * self.unit + 8 * coarse
        largest = size.max(initial=0, where=np.isfinite(size))
        return roundings * size + 8 * small * (1 + largest)

    def classes(self) -> tuple[np.ndarray, np.ndarray]:
        """h of a real scan from step to step in the state's dtype, and where that is certain.

        It is uncertain from a step on, until the next reset, where loops differ that fuse a product
        and a sum or not and that know subnormal numbers or not, where the largest number is near,
        and where an infinite factor meets a state of unknown sign. An operand counts as zero if it
        is subnormal in its own dtype, in which it is read, however wide the state is.
        """
        state = np.dtype(self.state)
        wide = np.longdouble if state == np.float64 else np.float64
        info = np.finfo(state)

        def plain(a, h, b):
            return (a * h) + b

        def fused(a, h, b):
            return (a.astype(wide) * h.astype(wide) + b.astype(wide)).astype(state)

        def normal(x, tiny=info.tiny):
            return np.where(np.abs(x) < tiny, state.type(0), x)

        def flushed(a, h, b):
            return normal(normal(a) * normal(h)) + normal(b)

        a, b = self.a.astype(state), self.b.astype(state)
        first = (np.zeros(self.step) if self.h0 is None else self.h0).astype(state)
        read = {
            name: normal(x, _least_normal(self.given[name].dtype))
            for name, x in (("a", a), ("b", b), ("h0", first))
            if self.given[name] is not None
        }
        hs = [first, first, read.get("h0", first)]
        unsure = np.zeros(self.step, bool)
        doubt = self._previous(self.error, None) + self.tiny >= np.abs(
            self._previous(self.h, self.h0)
        )
        out, certain = np.zeros(self.full_front, self.dtype), np.zeros(self.full_front, bool)
        with np.errstate(all="ignore"):
            for t in range(self.length):
                cut = self.cut[t]
                sign = np.isinf(a[t]) & np.isfinite(hs[0]) & doubt[t]
                near = np.abs(a[t].astype(wide) * hs[0].astype(wide) + b[t].astype(wide))
                hs = [
                    np.where(cut, b[t], plain(a[t], hs[0], b[t])),
                    np.where(cut, b[t], fused(a[t], hs[1], b[t])),
                    np.where(cut, read["b"][t], flushed(read["a"][t], hs[2], read["b"][t])),
                ]
                unsure = (unsure | sign | _near(near, info.max)) & ~cut
                unsure |= (_class(hs[0]) != _class(hs[1])) | (_class(hs[0]) != _class(hs[2]))
                stored = [_class(h.astype(self.dtype)) for h in hs]
                differ = (stored[0] != stored[1]) | (stored[0] != stored[2])
                out[t] = hs[0].astype(self.dtype)
                certain[t] = ~(unsure | differ | _near(near, _limit(self.dtype)))
        return self._back(out), self._back(certain)

    @property
    def full_front(self):
        return (self.length, *self.step)


def check_classes(actual, oracle: Oracle, what: str = "") -> int:
    """h is that of the loop wherever this is certain, infinities and NaNs included."""
    actual, (h, certain) = np.asarray(actual), oracle.classes()
    value, bound, _ = oracle.values()[0]
    assert np.array_equal(_class(actual)[certain], _class(h)[certain]), f"{what}: not finite alike"
    finite = certain & np.isfinite(h.astype(np.float64))
    check(actual[finite], Expected(value[finite], bound[finite]), what)
    return int(certain.sum())


def _class(x):
    """0 for finite numbers, 1 and -1 for infinities, 2 for NaN."""
    x = np.asarray(x, np.float64)
    return np.where(np.isnan(x), 2, np.where(np.isinf(x), np.sign(x), 0))


def _near(x, limit):
    return (0.99 * limit < x) & (x < 1.01 * limit)


def _limit(dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)


def _least_normal(dtype) -> float:
    """Smaller numbers may count as zero, but for float16's: they become normal in single."""
    return 0.0 if dtype == np.float16 else float(ml_dtypes.finfo(dtype).smallest_normal)


def _same(x):
    return x


def _wide(x):
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _abs(x):
    return None if x is None else np.abs(x)
