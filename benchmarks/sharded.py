"""Checks and times scans that are split over several devices: `python benchmarks/sharded.py`.

Every case runs on all devices of the machine, with a part of the same size on each device whatever
their number, and on one device of them. `weak_scaling` is the time of the same call on one device
with one part, over its time on all devices with all parts: 1 means that n devices do n times the
work of one. `against_linear_scan` has above the line what `linear_scan` takes for one part, which
passes over memory less often than a scan whose time is split. `sent` is what devices send each
other in the compiled program, as operations and shapes.

Values and gradients are compared with double precision: every element of small arrays, for all ways
of splitting them, and samples of what is timed. `right_devices` says that each device holds its own
part of every result.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import exact
import jax
import jax.numpy as jnp
import numpy as np
import report
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import Timed, forward_chain, in_turns

import jax_scan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax.typing import ArrayLike

_COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
_SECONDS = 0.5


class Split(NamedTuple):
    """A way to split (B, L, D): over which axis, and by what kind of program."""

    axis: str  # "batch", "channel" or "time"
    by: str  # "jit" with shardings, or "shard_map"

    @property
    def spec(self) -> P:
        place = {"batch": 0, "time": 1, "channel": 2}[self.axis]
        return P(*("d" if k == place else None for k in range(3)))

    def scan(self, mesh: Mesh) -> Callable[..., jax.Array]:
        over_time = self.axis == "time"
        if self.by == "jit":
            if not over_time:
                return jax_scan.linear_scan
            sharding = NamedSharding(mesh, self.spec)
            return functools.partial(jax_scan.sequence_parallel_scan, sharding=sharding)
        local = (
            functools.partial(jax_scan.sequence_parallel_scan, axis_name="d")
            if over_time
            else jax_scan.linear_scan
        )
        return jax.shard_map(local, mesh=mesh, in_specs=self.spec, out_specs=self.spec)


SPLITS = [Split(axis, by) for axis in ("batch", "channel", "time") for by in ("jit", "shard_map")]


def gradients(scan: Callable[..., jax.Array], a: Any, b: Any, g: Any) -> tuple[jax.Array, ...]:
    h, pull_back = jax.vjp(scan, a, b)
    return h, *pull_back(g)


# Between which factors lie: states are forgotten within 1024 steps, within 16384, or not at all.
_FACTORS = ((0.6, 1.0), (0.97, 0.99), (0.9999, 1.0))


def draw(
    mesh: Mesh, spec: P, shape: tuple[int, ...], factors: tuple[float, float] = _FACTORS[0]
) -> tuple[jax.Array, ...]:
    """a between `factors`, b and g between -1 and 1, made on the devices."""
    sharding = NamedSharding(mesh, spec)

    @functools.partial(jax.jit, out_shardings=sharding)
    def values() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(0), 3)
        bounds = (factors, (-1, 1), (-1, 1))
        return tuple(
            jax.random.uniform(key, shape, "float32", *bound)
            for key, bound in zip(keys, bounds, strict=True)
        )

    return values()


def error(got: Sequence[ArrayLike], given: Sequence[ArrayLike]) -> float:
    """The largest difference from double precision, relative to the largest value."""
    a, b, g = (np.moveaxis(np.asarray(x, np.float64), 1, 0) for x in given)
    want = exact.value_and_gradients(a, b, g)
    worst = 0.0
    for x, name in zip(got, ("h", "da", "db"), strict=False):
        y = np.moveaxis(np.asarray(x, np.float64), 1, 0)
        worst = max(worst, float(np.max(np.abs(y - want[name])) / np.max(np.abs(want[name]))))
    return report.rounded(worst)


def right_devices(results: tuple[jax.Array, ...], mesh: Mesh, spec: P) -> bool:
    """Each device holds the part of each result that the mesh gives it."""
    sharding = NamedSharding(mesh, spec)
    return all(
        {s.device: s.index for s in x.addressable_shards}
        == dict(sharding.addressable_devices_indices_map(x.shape))
        for x in results
    )


def sent(program: Any) -> list[str]:
    """What a compiled program sends between devices: operations with the shapes they result in."""
    found = re.findall(rf"= (\S+|\([^=]*\)) ({_COLLECTIVES})(?:-start)?\(", program.as_text())
    return sorted(f"{name} {re.sub(r'{[^}]*}', '', shape)}" for shape, name in found)


def profiled(run: Callable[[], Any], folder: Path) -> dict[str, float]:
    """The GPU's kernels that took part in communication, and the microseconds of all of each."""
    with jax.profiler.trace(str(folder)):
        jax.block_until_ready(run())
    (file,) = folder.rglob("*.xplane.pb")
    times: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if "GPU" in plane.name:
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        times[event.name] += event.duration_ns / 1e3
    return {name[:60]: round(us, 1) for name, us in times.most_common(12)}


# ---- Right values --------------------------------------------------------------------------------


def checks(devices: list[Any]) -> list[dict[str, Any]]:
    """Value and gradient of small arrays, however they are split."""
    n = len(devices)
    mesh = Mesh(np.array(devices), "d")
    rows = []
    for shape in ((2 * n, 96 * n, 16 * n), (n, n, n), (3 * n, 1000 * n, 33 * n)):
        for split in SPLITS:
            given = draw(mesh, split.spec, shape)
            program = jax.jit(functools.partial(gradients, split.scan(mesh)))
            results = program(*given)
            rows.append(
                {
                    "split": split.axis,
                    "by": split.by,
                    "shape": list(shape),
                    "devices": n,
                    "right_devices": right_devices(results, mesh, split.spec),
                    "max_rel_err": error(results, given),
                }
            )
    return rows


# ---- Times ---------------------------------------------------------------------------------------


class Case(NamedTuple):
    """What is timed: parts of one size on each device, and how many calls a program holds."""

    split: Split
    part: tuple[int, int, int]  # what each device has
    calls: int  # in one program
    factors: tuple[float, float] = _FACTORS[0]

    def shape(self, devices: int) -> tuple[int, ...]:
        grows = {"batch": 0, "time": 1, "channel": 2}[self.split.axis]
        return tuple(size * devices if k == grows else size for k, size in enumerate(self.part))


def cases(small: bool) -> list[Case]:
    parts = {
        "batch": [(32, 4096, 256)],
        "channel": [(8, 2048, 2048)],
        "time": [(1, 4194304 // 2, 64), (1, 262144, 1024)],
    }
    shrink = 64 if small else 1
    return [
        Case(split, (b, length // shrink, d), 10 if b > 1 else 4, factors)
        for split in SPLITS
        for b, length, d in parts[split.axis]
        for factors in (_FACTORS if split == Split("time", "shard_map") else _FACTORS[:1])
    ]


def _apart(scan: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`scan` that looks at its factors anew in every call of a chain, as those of layers do."""
    return lambda a, b: scan(*lax.optimization_barrier((a, b)))


def _gradient_chain(scan: Callable[..., jax.Array], calls: int) -> Callable[..., Any]:
    """Values and gradients, each of which needs those before it."""

    def chained(a: jax.Array, b: jax.Array, g: jax.Array) -> tuple[Any, ...]:
        found: list[tuple[jax.Array, ...]] = []
        for _ in range(calls):
            # All results leave the barrier, so that all are computed.
            b, g = lax.optimization_barrier((b, g))
            found.append(lax.optimization_barrier(gradients(scan, a, b, g)))
            g = found[-1][2]
        return found[0], [(h, da) for h, da, _ in found[1:]], g

    return chained


def timed(case: Case, devices: list[Any], folder: Path | None) -> list[dict[str, Any]]:
    n = len(devices)
    programs: dict[str, dict[str, Timed]] = {"forward": {}, "with gradient": {}}
    rows: dict[str, dict[str, Any]] = {}
    alone = Mesh(np.array(devices[:1]), "d")
    together = Mesh(np.array(devices), "d")
    candidates = {
        "all": (case.split.scan(together), together, case.shape(n)),
        "one": (case.split.scan(alone), alone, case.part),
        "linear_scan": (jax_scan.linear_scan, alone, case.part),
    }
    for name, (scan, mesh, shape) in candidates.items():
        given = draw(mesh, case.split.spec, shape, case.factors)
        forward = (
            jax.jit(forward_chain(_apart(scan), case.calls)).lower((given[0],), given[1]).compile()
        )
        run = functools.partial(forward, (given[0],), given[1])
        programs["forward"][name] = Timed(run, case.calls)
        backward = jax.jit(_gradient_chain(_apart(scan), case.calls)).lower(*given).compile()
        programs["with gradient"][name] = Timed(functools.partial(backward, *given), case.calls)
        if name != "all":
            continue
        single = {
            "forward": jax.jit(scan).lower(given[0], given[1]).compile(),
            "with gradient": jax.jit(functools.partial(gradients, scan)).lower(*given).compile(),
        }
        for direction, program in single.items():
            operands = given[:2] if direction == "forward" else given
            results = program(*operands)
            results = results if isinstance(results, tuple) else (results,)
            # All of time of some channels, the first and last of those of each device.
            outer = sorted({0, shape[0] // n, shape[0] - 1})
            inner = sorted({0, shape[2] // n, shape[2] - 1})
            taken = jax.jit(lambda x, o=outer, i=inner: x[jnp.array(o)][..., jnp.array(i)])
            rows[direction] = {
                "split": case.split.axis,
                "by": case.split.by,
                "shape": list(shape),
                "dtype": "float32",
                "factors": list(case.factors),
                "direction": direction,
                "devices": n,
                "sent": sent(program),
                "right_devices": right_devices(results, together, case.split.spec),
                "max_rel_err": error(
                    tuple(np.asarray(taken(x)) for x in results),
                    tuple(np.asarray(taken(x)) for x in given),
                ),
            }
            if folder and devices[0].platform == "gpu" and case.split.by == "shard_map":
                where = (
                    folder
                    / f"{case.split.axis}-{shape[2]}-{case.factors[0]}-{direction.split()[0]}"
                )
                run = functools.partial(program, *operands)
                rows[direction]["kernels_us"] = profiled(run, where)
    for direction, found in programs.items():
        us = in_turns(found, _SECONDS)
        rows[direction] |= {
            "ours_us": report.rounded(us["all"]),
            "one_device_us": report.rounded(us["one"]),
            "linear_scan_us": report.rounded(us["linear_scan"]),
            "weak_scaling": round(us["one"] / us["all"], 3),
            "against_linear_scan": round(us["linear_scan"] / us["all"], 3),
        }
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks and times scans over several devices.")
    parser.add_argument("--devices", type=int, help="default: all that there are")
    parser.add_argument("--split", choices=["batch", "channel", "time"], help="only this one")
    parser.add_argument("--small", action="store_true", help="short parts, to try the program")
    parser.add_argument("--profiles", type=Path, help="a folder for profiles of the programs")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<device>-x<n>.json")
    arguments = parser.parse_args()
    devices = jax.devices()[: arguments.devices]
    name = f"{report.slug(report.device())}-x{len(devices)}"
    out = arguments.out or Path(__file__).parent / "results" / f"{name}.json"
    header = {**report.header(), "method": " ".join((__doc__ or "").split("\n\n")[1].split())}
    results: dict[str, Any] = {**header, "devices": len(devices), "checks": [], "rows": []}
    results["checks"] = checks(devices)
    for case in cases(arguments.small):
        if arguments.split not in (None, case.split.axis):
            continue
        for row in timed(case, devices, arguments.profiles):
            results["rows"].append(row)
            print(json.dumps(row), flush=True)
            out.write_text(report.text(results))
        jax.clear_caches()
    bad = [
        row
        for row in results["checks"] + results["rows"]
        if not (row["right_devices"] and row["max_rel_err"] < 1e-5)
    ]
    for row in bad:
        print(f"WRONG: {json.dumps(row)}")
    worst = max(row["max_rel_err"] for row in results["checks"])
    print(f"{len(results['checks'])} checks, largest error {worst}; {len(bad)} wrong; {out}")
    return 1 if bad or math.isnan(worst) else 0


if __name__ == "__main__":
    sys.exit(main())
