"""How long calls take, measured in turns; and compilation of many programs at a time."""

from __future__ import annotations

import concurrent.futures
import os
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import lax

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Seconds of work between two looks at the clock; on a GPU with the launches of single programs.
_BATCH = {"gpu": 24e-3, "cpu": 4e-3}
_ROUNDS = 5
_QUEUE = 24  # programs: JAX queues no more than 32 before it waits itself


class Timed(NamedTuple):
    """A function of no arguments that starts so many calls; what it returns can be waited for.

    `warm`: it has run before.
    """

    start: Callable[[], Any]
    calls: int = 1
    wait: Callable[[Any], Any] = jax.block_until_ready
    warm: bool = False


def in_turns(candidates: dict[str, Timed], seconds: float) -> dict[str, float]:
    """The median time of one call of each in microseconds.

    They take turns, so that clocks, temperature and neighbours are the same for all. A turn is one
    program or, if they are short, several: on a CPU, where they would share the cores, one after
    the other; on a GPU a queue of them, timed from the end of its first third, so that the first
    launch of a turn (0.5 to 0.8 ms, until which the GPU has nothing to do) is left out. What is
    slow has fewer turns, down to a single one.
    """
    batch = _BATCH.get(jax.default_backend(), 1e-3)
    programs: dict[str, int] = {}
    turns: dict[str, int] = {}
    times: dict[str, list[float]] = {}
    for name, candidate in candidates.items():
        if not candidate.warm:
            _run(candidate, 1)
        once = _run(candidate, 1)
        programs[name] = max(1, min(int(batch / once), 200))
        turns[name] = 0 if once > seconds else 3 if once > seconds / 5 else _ROUNDS
        times[name] = [] if turns[name] else [once / candidate.calls]
    start = time.perf_counter()
    turn = 0
    while turn < max(turns.values()) or (time.perf_counter() - start < seconds and turn < 200):
        for name, candidate in candidates.items():
            if turn < turns[name] or turns[name] == _ROUNDS:
                count = programs[name]
                times[name].append(_turn(candidate, count) / candidate.calls)
        turn += 1
    return {name: statistics.median(found) * 1e6 for name, found in times.items()}


def _turn(candidate: Timed, programs: int) -> float:
    """Seconds for one program."""
    if jax.default_backend() == "cpu":
        return _run(candidate, programs) / programs
    third = max(1, programs // 2)

    def difference() -> float:
        return (_run(candidate, 3 * third) - _run(candidate, third)) / (2 * third)

    if third > _QUEUE // 3 or candidate.wait is not jax.block_until_ready:
        # What is native can be waited for as a whole only, and starts within microseconds.
        return difference()
    # All are queued before one is waited for: how long that takes differs by a tenth of a turn.
    for _ in range(third - 1):
        candidate.start()
    first = candidate.start()
    for _ in range(2 * third - 1):
        candidate.start()
    last = candidate.start()
    if all(array.is_ready() for array in jax.tree.leaves(first)):
        candidate.wait(last)  # the host was slower: the clock would start too late
        return difference()
    candidate.wait(first)
    begin = time.perf_counter()
    candidate.wait(last)
    return (time.perf_counter() - begin) / (2 * third)


def _run(candidate: Timed, programs: int) -> float:
    start = time.perf_counter()
    if jax.default_backend() == "cpu":
        for _ in range(programs):
            candidate.wait(candidate.start())
        return time.perf_counter() - start
    # A result that is dropped at once gives its memory to the next one's. With the same addresses
    # in each execution XLA replays a program's CUDA graph as it is, instead of updating it.
    for _ in range(programs - 1):
        candidate.start()
    candidate.wait(candidate.start())
    return time.perf_counter() - start


# ---- Chains --------------------------------------------------------------------------------------
#
# A chain is a program of many calls, each of which needs the one before. By default XLA puts five
# or more kernels that follow each other into one CUDA graph (xla_gpu_graph_min_graph_size is 5;
# FUSION and CUSTOM_CALL are among xla_gpu_enable_command_buffer), so it is graphs that are timed,
# of ours and of the limit alike. Barriers keep the calls apart and cost nothing.
#
# h is the next call's b, and db the next one's g. With factors of mean 0.6 a scan amplifies slow
# changes 2.5 times; with a and -a by turns two calls amplify nothing more than 1.6 times, so that
# nothing grows to where maps of steps are not trusted, and kernels take a slower path. (A chain
# that begins anew with the same numbers is no way out: XLA computes equal calls once.)


def forward_chain(scan: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """(factors, b, ...) -> the first call's result, and the last one's."""

    def chained(factors: Sequence[jax.Array], b: jax.Array, *rest: jax.Array) -> tuple[Any, ...]:
        found: list[Any] = []
        for k in range(calls):
            found.append(lax.optimization_barrier(scan(factors[k % len(factors)], b, *rest)))
            b = found[-1][0] if isinstance(found[-1], tuple) else found[-1]
        return found[0], *([b] if calls > 1 else [])

    return chained


def backward_chain(calls: int, keep: bool = True) -> Callable[..., Any]:
    """(pull-backs, g) -> the first call's gradients, and what else was computed.

    `keep`: all of it. Else the last call's alone, so that the others share their memory and stay in
    the cache; for what XLA does not leave out where nobody wants it, a kernel's second result.
    """

    def chained(pull_backs: Sequence[Any], g: Any) -> tuple[Any, ...]:
        found = []
        for k in range(calls):
            found.append(lax.optimization_barrier(pull_backs[k % len(pull_backs)](g)))
            db = found[-1][1]
            g = (db, g[1]) if isinstance(g, tuple) else db
        others = [(da, *rest) for da, _, *rest in found[1:]]
        return found[0], others if keep else others[-1:], *([db] if calls > 1 else [])

    return chained


# Programs of peers that compile slowly hold one call, in a loop.


def forward_loop(scan: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """(factors, b) -> the last call's result."""

    def looped(factors: Sequence[jax.Array], b: jax.Array) -> tuple[jax.Array]:
        return (lax.fori_loop(0, calls, lambda _, h: scan(factors[0], h), b),)

    return looped


def backward_loop(calls: int) -> Callable[..., Any]:
    """(pull-backs, g) -> the last call's gradients."""

    def looped(pull_backs: Sequence[Any], g: jax.Array) -> tuple[Any]:
        da = spec(jax.eval_shape(pull_backs[0], g)[0])
        start = (lax.full(da.shape, 0, da.dtype), g)
        return (lax.fori_loop(0, calls, lambda _, found: pull_backs[0](found[1]), start),)

    return looped


# ---- Compilation ---------------------------------------------------------------------------------


def compile_all(traced: dict[Any, jax.stages.Traced]) -> dict[Any, Callable[..., Any]]:
    """Compiles on all cores: XLA leaves the interpreter free while it works."""
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda program: program.lower().compile(), traced.values())
        programs = dict(zip(traced, compiled, strict=True))
    print(f"{len(programs)} programs compiled in {time.perf_counter() - start:.0f} s", flush=True)
    return programs


def spec(tree: Any) -> Any:
    """The shapes and dtypes of arrays, or of what a traced program returns."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
