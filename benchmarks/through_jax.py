"""Figures of the scan as JAX's and torch's users meet it, on a GPU: whole programs, not kernels."""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING, Any

import jax
from data import draw
from peers import jax_peers
from problems import Problem
from timing import Timed, in_turns

import jax_scan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PROBLEM = Problem("through JAX", (32, 4096, 256), (0, 0), peers="jax")
_SECONDS = 0.4


def figures(done: set[str]) -> Iterator[dict[str, Any]]:
    """One by one, those that are not done."""
    for figure in (_gradient_of_a_loss, _peak_memory, _torch_module, _compile_time):
        what = (figure.__doc__ or "").removesuffix(".")
        if what not in done:
            yield {"what": what, "shape": list(_PROBLEM.shape), **figure()}


def _scans() -> dict[str, Callable[..., jax.Array]]:
    return {
        "jax_scan": jax_scan.linear_scan,
        "lax.associative_scan": jax_peers(_PROBLEM)["lax.associative_scan"],
    }


def _gradient_of_a_loss() -> dict[str, Any]:
    """Gradients of sum(h * w) by a and b."""
    data = jax.jit(functools.partial(draw, _PROBLEM))()

    def timed(scan: Callable[..., jax.Array]) -> Timed:
        loss = jax.jit(jax.grad(lambda a, b, w: (scan(a, b) * w).sum(), argnums=(0, 1)))
        return Timed(functools.partial(loss, data.a, data.b, data.g))

    us = in_turns({name: timed(scan) for name, scan in _scans().items()}, _SECONDS)
    ours = us.pop("jax_scan")
    return {
        "ours_us": round(ours, 1),
        "peers": {name: round(time, 1) for name, time in us.items()},
        "times_faster": round(us["lax.associative_scan"] / ours, 2),
        "goal": 3.7,
    }


def _peak_memory() -> dict[str, Any]:
    """Memory of a program that takes a, b, g and returns da, db, in arrays of h's size."""
    spec = jax.ShapeDtypeStruct(_PROBLEM.shape, "float32")
    found = {}
    for name, scan in _scans().items():

        def gradients(a: Any, b: Any, g: Any, scan: Any = scan) -> Any:
            return jax.vjp(scan, a, b)[1](g)

        analysis = jax.jit(gradients).lower(spec, spec, spec).compile().memory_analysis()
        parts = ("argument", "output", "temp")
        sizes = [getattr(analysis, f"{part}_size_in_bytes") for part in parts]
        found[name] = round(sum(sizes) / _PROBLEM.array_bytes()[1], 3)
    # Three arguments, two results and h.
    return {"ours": found.pop("jax_scan"), "peers": found, "goal": 6}


def _torch_module() -> dict[str, Any]:
    """ModelNew.forward of torch tensors, queued, against the kernel in a chain of JAX's."""
    try:
        import torch

        from jax_scan.torch import ModelNew
    except ModuleNotFoundError:
        return {"ours_us": None}
    if not torch.cuda.is_available():
        return {"ours_us": None}
    from timing import forward_chain

    a, b = torch.rand(2, *_PROBLEM.shape, device="cuda").unbind()
    model = ModelNew(_PROBLEM.shape[-1])

    def forward() -> None:
        with torch.no_grad():
            model(a, b)

    calls = 8
    factors = [jax.dlpack.from_dlpack(x) for x in (a, -a)]
    chain = jax.jit(forward_chain(jax_scan.linear_scan, calls))
    candidates = {
        "module": Timed(forward, wait=lambda _: torch.cuda.synchronize()),
        "kernel": Timed(functools.partial(chain, factors, jax.dlpack.from_dlpack(b)), calls),
    }
    us = in_turns(candidates, _SECONDS)
    return {
        "ours_us": round(us["module"], 1),
        "kernel_us": round(us["kernel"], 1),
        "of_the_kernels_speed": round(us["kernel"] / us["module"], 3),
        "goal": 0.85,
    }


def _compile_time() -> dict[str, Any]:
    """Seconds to trace and compile, by length, for (1, length, 64)."""

    def seconds(function: Callable[..., Any], length: int) -> float:
        spec = jax.ShapeDtypeStruct((1, length, 64), "float32")
        start = time.perf_counter()
        jax.jit(lambda a, b: function(a, b)).lower(spec, spec).compile()
        return round(time.perf_counter() - start, 3)

    def gradient(scan: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.grad(lambda a, b: scan(a, b).sum(), argnums=(0, 1))

    ours, peer = _scans().values()
    seconds(ours, 32)  # what only the first program of a process pays for
    found = {"goal": 0.2, "cores": len(os.sched_getaffinity(0)), "forward": {}, "gradient": {}}
    for length in (64, 4096, 1 << 20):
        found["forward"][length] = seconds(ours, length)
        found["gradient"][length] = seconds(gradient(ours), length)
    found["peers"] = {"lax.associative_scan": {4096: seconds(peer, 4096)}}
    return found
