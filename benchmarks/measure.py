"""The rows of a group of problems: ours, the limit and the peers, timed and checked."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import jax
import limits
import native
import peers
import torch_peers
from data import Checker, Data, draw, scan_of
from report import labels, rounded
from timing import (
    Timed,
    backward_chain,
    backward_loop,
    compile_all,
    forward_chain,
    forward_loop,
    in_turns,
    spec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from problems import Problem

_SECONDS = 0.25  # for ours and the limits of a row together, and for its peers
_CALLS_IN_LOOPS = 10


def measure(group: list[Problem], with_peers: bool) -> Iterator[dict[str, Any]]:
    """Compiles the programs of all problems of a group at a time, then runs one by one."""
    if not with_peers:
        group = [problem._replace(peers="") for problem in group]
    if jax.default_backend() == "gpu":
        native.start_build("baselines.cu")  # while XLA compiles
    parts = [_Part(problem) for problem in group]
    traced = {(k, key): t for k, part in enumerate(parts) for key, t in part.traced().items()}
    programs = compile_all(traced)
    for k, part in enumerate(parts):
        try:
            yield from part.rows({key: f for (m, key), f in programs.items() if m == k})
        except jax.errors.JaxRuntimeError as error:  # memory, most likely: the others go on
            print(f"FAILED: {part.problem}: {error}"[:500], file=sys.stderr)
        limits.release()


class _Part:
    """The measurement of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.checker = Checker(problem)
        self.calls = _calls(problem)
        self.programs: dict[Any, Callable[..., Any]] = {}

    # Programs are known by: "draw"; (scan, "vjp" | direction); (direction, limit); a sampled
    # array's shape and dtype.

    def traced(self) -> dict[Any, jax.stages.Traced]:
        found: dict[Any, jax.stages.Traced] = {}

        def trace(key: Any, function: Callable[..., Any], *args: Any) -> Any:
            found[key] = jax.jit(function).trace(*args)
            return spec(found[key].out_info)

        data: Data = trace("draw", functools.partial(draw, self.problem))
        for name, scan in self._scans("forward").items():
            # `reset` is no argument of a scan, but it must be one of the program.
            reset, args, _ = self._arguments(name, data)
            factors = (data.a,) * min(2, self._calls_of(name))
            trace((name, "forward"), self._forward(name, scan), reset, factors, *args[1:])
        if "backward" in self.problem.directions:
            for name, scan in self._scans("backward").items():
                reset, args, cotangent = self._arguments(name, data)
                _, pull_back = trace((name, "vjp"), _vjp(scan), reset, *args)
                pull_backs = (pull_back,) * min(2, self._calls_of(name))
                trace((name, "backward"), self._backward(name), pull_backs, cotangent)
        for direction in self.problem.directions:
            for name, (function, args) in self._limits(direction, data).items():
                trace((direction, name), function, *args)
        arrays: list[Any] = [data.a, data.b]
        if self.problem.variant == "reset":
            shape = data.b.shape[: self.problem.axis + 1]
            arrays.append(jax.ShapeDtypeStruct(shape + (1,) * (data.b.ndim - len(shape)), bool))
        for x in arrays:
            trace((x.shape, x.dtype), self.checker.sample, x)
        return found

    def _limits(self, direction: str, data: Data) -> dict[str, limits.Program]:
        make = limits.forward_programs if direction == "forward" else limits.backward_programs
        return make(data, self.calls)

    def _arguments(self, name: str, data: Data) -> tuple[Any, tuple[jax.Array, ...], Any]:
        """A scan's reset, arguments and cotangent. Peers know no options."""
        if name == "ours":
            return data.reset, data.differentiable, data.cotangent
        return None, (data.a, data.b), data.g

    def _scans(self, direction: str) -> dict[str, Callable[..., Any]]:
        """By name: reset -> (a, b, h0?) -> h, or h and the state."""
        others = peers.jax_peers(self.problem) if self.problem.has_peers(direction) else {}
        return {
            "ours": functools.partial(scan_of, self.problem),
            **{name: lambda reset, scan=scan: scan for name, scan in others.items()},
        }

    def _calls_of(self, name: str) -> int:
        return self.calls if name == "ours" else _CALLS_IN_LOOPS if self._in_loop(name) else 1

    def _in_loop(self, name: str) -> bool:
        on_gpu = jax.default_backend() == "gpu"
        return on_gpu and self.problem.short and name == "lax.associative_scan"

    def _forward(self, name: str, scan: Callable[..., Any]) -> Callable[..., Any]:
        make = forward_loop if self._in_loop(name) else forward_chain
        calls = self._calls_of(name)
        return lambda reset, factors, *args: make(scan(reset), calls)(factors, *args)

    def _backward(self, name: str) -> Callable[..., Any]:
        if self._in_loop(name):
            return backward_loop(self._calls_of(name))
        # On a CPU an array that a program returns costs 1.5 us and takes its part of the caches.
        return backward_chain(self._calls_of(name), keep=jax.default_backend() == "gpu")

    def rows(self, programs: dict[Any, Callable[..., Any]]) -> Iterator[dict[str, Any]]:
        self.programs = programs
        data: Data = jax.block_until_ready(programs["draw"]())
        self.checker.expect(data, self._taken)
        host = peers.host_peers(self.problem, data)
        for direction in self.problem.directions:
            yield self._row(direction, data, host[direction])

    def _row(self, direction: str, data: Data, host: dict[str, Any]) -> dict[str, Any]:
        calls = self.calls
        found: dict[str, Timed] = {}
        slow: dict[str, Timed] = {}
        others: dict[str, float] = {}
        errors: dict[str, float] = {}
        for name in self._scans(direction):
            timed, got = self._jax_timed(name, direction, data)
            (found if name == "ours" else slow)[name] = timed
            if not self._in_loop(name):  # else it is not the first call's
                errors[name] = self.checker.error(self._taken, **got)
        xla = {
            name: Timed(functools.partial(self.programs[direction, name], *args), calls)
            for name, (_, args) in self._limits(direction, data).items()
        }
        if jax.default_backend() == "cpu":
            # The limit is what C++ can do; XLA's call is a peer.
            found["XLA elementwise"] = next(iter(xla.values()))
            with limits.triads(self.problem, direction, calls) as triads:
                us = in_turns(found | triads, _SECONDS)
            others["XLA elementwise"] = us.pop("XLA elementwise")
        else:
            us = in_turns(found | xla | limits.graphs(self.problem, direction, calls), _SECONDS)
        ours = us.pop("ours")
        best = min(us, key=lambda name: us[name])
        others |= in_turns(slow, _SECONDS) if slow else {}
        for name, peer in host.items():  # one by one: numba's threads stay busy for a while
            others |= in_turns({name: Timed(peer, wait=lambda _: None)}, _SECONDS)
            errors[name] = self.checker.error(self._taken, **peer())
        if jax.default_backend() == "gpu" and self.problem.peers == "all":
            for name, timed, values in torch_peers.measurements(self.problem, data, direction):
                others |= in_turns({name: timed}, _SECONDS / 2)
                arrays = {what: jax.dlpack.from_dlpack(x) for what, x in values.items()}
                errors[name] = self.checker.error(self._taken, **arrays)
        moved = self.problem.moved_bytes(direction)
        return {
            **labels(self.problem, direction),
            "ours_us": rounded(ours),
            "limit_us": rounded(us[best]),
            "ratio": rounded(us[best] / ours),
            "goal": self.problem.goal(direction),
            "gb_per_s": rounded(moved / ours / 1e3),
            "peers": {name: rounded(time) for name, time in others.items()},
            "max_rel_err": errors.pop("ours"),
            "peer_errors": errors,
            "limit": best,
        }

    def _jax_timed(
        self, name: str, direction: str, data: Data
    ) -> tuple[Timed, dict[str, jax.Array]]:
        """A scan's chain, and what its first call computes."""
        reset, args, cotangent = self._arguments(name, data)
        calls = self._calls_of(name)
        factors = (data.a, -data.a) if calls > 1 else (data.a,)
        program = self.programs[name, direction]
        if direction == "forward":
            start = functools.partial(program, reset, factors, *args[1:])
            names = ("h", "state")
        else:
            vjp = self.programs[name, "vjp"]
            pull_backs = tuple(vjp(reset, a, *args[1:])[1] for a in factors)
            start = functools.partial(program, pull_backs, cotangent)
            names = ("da", "db", "dh0")
        first = jax.block_until_ready(start())[0]
        got = first if isinstance(first, tuple) else (first,)
        return Timed(start, calls, warm=name != "ours"), dict(zip(names, got, strict=False))

    def _taken(self, x: jax.Array) -> jax.Array:
        program = self.programs.get((x.shape, x.dtype))
        return program(x) if program else self.checker.sample(x)


def _calls(problem: Problem) -> int:
    """The length of chains: a millisecond on a GPU, except where a call takes longer."""
    if problem.short:
        return 100
    if jax.default_backend() == "cpu":
        return 1
    return max(1, min(10, (1 << 30) // problem.array_bytes()[1]))


def _vjp(scan: Callable[..., Any]) -> Callable[..., Any]:
    return lambda reset, *args: jax.vjp(scan(reset), *args)
