"""That nothing is slow by orders of magnitude; how fast it is, benchmarks/ measure."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import Case, arguments
from programs import lax_scan

from jax_scan import linear_scan

GPU = jax.default_backend() == "gpu"


def least_times(*calls: Any, until: Any, rounds: int = 40) -> tuple[bool, list[float]]:
    """Seconds of each call, the least over rounds in turn, until `until` holds for them.

    A neighbour on the machine delays some rounds, a slow path all of them.
    """
    for f in calls:
        jax.block_until_ready(f())
    best = [float("inf")] * len(calls)
    for left in reversed(range(rounds)):
        for i, f in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(f())
            best[i] = min(best[i], time.perf_counter() - start)
        if until(*best) or not left:
            break
        time.sleep(0.05)
    return until(*best), best


def given(*shape: int) -> list[jax.Array]:
    return [jnp.asarray(x) for x in arguments(Case("", shape))[:2]]


def gradient(scan: Any, a: Any, b: Any) -> Any:
    return jax.vjp(scan, a, b)[1](b)


@pytest.mark.parametrize("f", ["value", "gradient"])
def test_P1_faster_than_lax_scan(f):
    """On a GPU each step of `lax.scan` is a launch or more."""
    x = given(8, 4096, 256) if GPU else given(8, 1024, 256)
    ours, loop = (
        jax.jit(scan if f == "value" else partial(gradient, scan))
        for scan in (linear_scan, lax_scan)
    )
    limit = 0.1 if GPU else 1
    fast, times = least_times(
        partial(ours, *x), partial(loop, *x), until=lambda ours, loop: ours < limit * loop
    )
    assert fast, times


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_P1_mixed_dtypes(dtype):
    """Where b has fewer bits than a, less is read and written; conversions cost little."""
    a, b = given(8, 2048, 256)
    scan = partial(linear_scan, out_dtype=a.dtype)
    f = jax.jit(lambda a, b: jax.vjp(scan, a, b)[1](a))
    limit = 10 if GPU else 4
    fast, times = least_times(
        partial(f, a, b.astype(dtype)),
        partial(f, a, b),
        until=lambda mixed, alike: mixed < limit * alike,
    )
    assert fast, times


@pytest.mark.parametrize("shape", [(1, 30000, 1), (1, 10**6, 1)])
def test_P1_one_long_channel(shape):
    """Parallel over time where there is nothing else: far from a launch or a microsecond a step."""
    x = given(*shape)
    for f in (linear_scan, partial(gradient, linear_scan)):
        fast, times = least_times(
            partial(jax.jit(f), *x), until=lambda t: t < 0.001 + shape[1] * 5e-8
        )
        assert fast, times


@pytest.mark.parametrize("shape", [(4, 4096, 64), (1, 2**17, 4)])
def test_P1_no_power_of_two_is_needed(shape):
    f = jax.jit(partial(gradient, linear_scan))
    even, odd = given(*shape), given(shape[0], shape[1] + 1, shape[2])
    fast, times = least_times(
        partial(f, *odd), partial(f, *even), until=lambda odd, even: odd < 2 * even + 1e-4
    )
    assert fast, times
    memory = [f.lower(*x).compile().memory_analysis().temp_size_in_bytes for x in (even, odd)]
    assert memory[1] < 1.1 * memory[0] + 4096


def test_P1_launches_do_not_grow_with_the_length():
    """One custom call, and not one operation more, whatever the length."""
    programs = [
        str(jax.jit(partial(gradient, linear_scan)).lower(*x).compile().as_text())
        for x in ([jax.ShapeDtypeStruct((8, n, 256), "float32")] * 2 for n in (64, 4096, 2**17))
    ]
    assert [p.count('custom_call_target="jax_scan') for p in programs] == [2] * 3
    assert len({p.count(" = ") for p in programs}) == 1


def test_P2_memory_of_a_large_gradient():
    """Beside a, g and the gradients: h. Only compiled."""
    x = [jax.ShapeDtypeStruct((4, 16384, 512), "float32")] * 2
    memory = jax.jit(partial(gradient, linear_scan)).lower(*x).compile().memory_analysis()
    h = 4 * 16384 * 512 * 4
    assert memory.temp_size_in_bytes < 1.1 * h


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_P2_compile_time_of_a_long_gradient(dtype):
    x = [jax.ShapeDtypeStruct((1, 50000, 32), dtype)] * 2

    def loss(a, b):
        return jnp.sum(jnp.abs(linear_scan(a, b)) ** 2)

    start = time.process_time()
    jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*x).compile()
    assert time.process_time() - start < 10
