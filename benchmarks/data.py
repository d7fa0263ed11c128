"""A problem's arrays, and what a scan of them is in double precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import exact
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_scan

if TYPE_CHECKING:
    from problems import Problem


class Data(NamedTuple):
    """A problem's arrays. g and gstate are the cotangents of h and the state."""

    a: jax.Array
    b: jax.Array
    g: jax.Array
    h0: jax.Array | None
    reset: jax.Array | None
    gstate: jax.Array | None

    @property
    def differentiable(self) -> tuple[jax.Array, ...]:
        return (self.a, self.b) if self.h0 is None else (self.a, self.b, self.h0)

    @property
    def cotangent(self) -> Any:
        return self.g if self.gstate is None else (self.g, self.gstate)


def draw(problem: Problem) -> Data:
    """Random factors of modulus 0.3 to 0.9; everything else between -2 and 2. To be compiled."""
    # This generator compiles in a tenth of the time of the default one.
    keys = iter(jax.random.split(jax.random.key(0, impl="rbg"), 8))

    def values(shape: tuple[int, ...], dtype: str) -> jax.Array:
        if dtype == "complex64":
            return lax.complex(*(values(shape, "float32") for _ in range(2)))
        return jax.random.uniform(next(keys), shape, "float32", -2, 2).astype(dtype)

    axis = problem.axis
    a_dtype = problem.a_dtype or problem.dtype
    a = jax.random.uniform(next(keys), problem.full_a_shape, "float32", 0.3, 0.9)
    if a_dtype == "complex64":
        a = a * jnp.exp(1j * jax.random.uniform(next(keys), a.shape, "float32", -3, 3))
    step = (*problem.shape[:axis], *problem.shape[axis + 1 :])
    state = "float32" if problem.dtype in ("bfloat16", "float16") else problem.dtype
    return Data(
        a.astype(a_dtype),
        values(problem.shape, problem.dtype),
        values(problem.shape, problem.dtype),
        values(step, state) if problem.variant == "h0" else None,
        jax.random.bernoulli(next(keys), 0.01, problem.shape[: axis + 1])
        if problem.variant == "reset"
        else None,
        values(step, state) if problem.variant == "return_state" else None,
    )


def scan_of(problem: Problem, reset: jax.Array | None) -> Callable[..., Any]:
    """Our scan with the problem's options: (a, b, h0?) -> h, or h and the state."""
    return functools.partial(
        jax_scan.linear_scan,
        axis=problem.axis,
        reverse=problem.variant == "reverse",
        return_state=problem.variant == "return_state",
        out_dtype=problem.dtype,
        reset=reset,
    )


# ---- Correctness ---------------------------------------------------------------------------------


Sampler = Callable[[jax.Array], jax.Array]


class Checker:
    """Compares results with double precision.

    It looks at every element, or in large problems at all times of some channels: a channel goes
    together with those that it shares factors with.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.chosen = _sample(problem)
        self.want: dict[str, np.ndarray] = {}

    def sample(self, x: jax.Array) -> jax.Array:
        """What is looked at of an array of the full shape, or with axes of size 1."""
        for k, index in self.chosen.items():
            if x.shape[k] > 1:
                x = jnp.take(x, index, axis=k)
        return x

    def expect(self, data: Data, taken: Sampler) -> None:
        """Computes what is right. `taken` is `sample`, compiled."""
        host = functools.partial(self._host, taken=taken)
        b = host(data.b)
        a = np.broadcast_to(host(data.a), b.shape)
        reset = data.reset
        if reset is not None:
            reset = host(reset.reshape(*reset.shape, *(1,) * (data.b.ndim - reset.ndim)))
            reset = np.broadcast_to(reset, b.shape)
        first = [None if x is None else self._step(x, taken) for x in (data.h0, data.gstate)]
        if "backward" not in self.problem.directions:
            assert self.problem.variant == "plain"
            self.want = {"h": exact.scan(a, b)}
            return
        self.want = exact.value_and_gradients(a, b, host(data.g), first[0], reset, first[1])
        shape = self.problem.full_a_shape
        summed = tuple(k for k in range(b.ndim) if shape[k] == 1 != self.problem.shape[k])
        # Time is the first axis here.
        axis = self.problem.axis
        summed = tuple(0 if k == axis else k + 1 if k < axis else k for k in summed)
        self.want["da"] = self.want["da"].sum(summed, keepdims=True)
        self.want["state"] = self.want["h"][-1]

    def error(self, taken: Sampler, **got: jax.Array) -> float:
        """The largest difference relative to the largest value, of what is given."""
        errors = []
        for name, x in got.items():
            one_step = name in ("state", "dh0")
            y = self._step(x, taken) if one_step else self._host(x, taken)
            want = self.want[name]
            worst, largest = np.max(np.abs(y - want)), np.max(np.abs(want))
            # da of a single step without h0 is 0.
            relative = 0.0 if worst == 0 else worst / largest if largest > 0 else np.inf
            errors.append(float(np.nan_to_num(relative, nan=np.inf)))
        return float(f"{max(errors):.3g}")

    def _host(self, x: jax.Array, taken: Sampler) -> np.ndarray:
        """The sample of it in double precision, with time first and in the order of the scan."""
        y = np.moveaxis(np.asarray(taken(x) if self.chosen else x), self.problem.axis, 0)
        if self.problem.variant == "reverse":
            y = y[::-1]
        return y if y.dtype == bool else y.astype(np.result_type(y.dtype, np.float64))

    def _step(self, x: jax.Array, taken: Sampler) -> np.ndarray:
        return self._host(jnp.expand_dims(x, self.problem.axis), taken)[0]


def _sample(problem: Problem) -> dict[int, np.ndarray]:
    """For each axis that is sampled the indices to look at."""
    shape, axis = problem.shape, problem.axis
    if np.prod(shape) <= 1 << 20:
        return {}
    free = [k for k, n in enumerate(problem.full_a_shape) if n == shape[k] and k != axis]
    whole = np.prod([n for k, n in enumerate(shape) if k not in free])
    left = max(1, min(128, (1 << 21) // int(whole)))
    rng = np.random.default_rng(0)
    chosen = {}
    for k in reversed(free):
        size = min(shape[k], left if k == free[0] else max(1, left // 2))
        chosen[k] = np.sort(rng.choice(shape[k], size, replace=False))
        left = max(1, left // size)
    return chosen
