"""Meshes of devices, arrays sharded over them, and what a compiled program does between devices."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "ragged-all-to-all",
    "collective-broadcast",
)


def mesh(axis_type: AxisType = AxisType.Auto, **sizes: int) -> jax.sharding.Mesh:
    """As many devices as it takes: GPUs if there are enough, else CPU devices."""
    count = int(np.prod(list(sizes.values())))
    devices = jax.devices()
    if len(devices) < count:
        devices = jax.devices("cpu")
    types = (axis_type,) * len(sizes)
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices[:count]
    )


def put(x: Any, over: jax.sharding.Mesh, spec: P) -> jax.Array:
    return jax.device_put(x, NamedSharding(over, spec))


def collectives(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """What a compiled program sends between devices: operations and the shapes of their results."""
    names = "|".join(COLLECTIVES)
    found = []
    for shapes, name in re.findall(rf"= (\S+|\([^=]*\)) ({names})(?:-start)?\(", text):
        for dims in re.findall(r"\[([\d,]*)\]", shapes):
            found.append((name, tuple(int(n) for n in dims.split(",") if n)))
    return sorted(found)


def calls(text: str) -> list[tuple[str, list[tuple[int, ...]]]]:
    """The package's custom calls in a compiled program, with the shapes of their operands."""
    found = []
    for line in text.splitlines():
        target = re.search(r'custom_call_target="jax_scan\.v\d+\.(\w+)"', line)
        if target:
            constraints = re.search(r"operand_layout_constraints=\{(.*?)\}\}", line + "}")
            assert constraints
            shapes = re.findall(r"\w+\[([\d,]*)\]", constraints[1])
            found.append((target[1], [tuple(map(int, filter(None, s.split(",")))) for s in shapes]))
    return found


@contextlib.contextmanager
def partitioner(shardy: bool) -> Iterator[None]:
    """Compiles with Shardy, or with what XLA had before it."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", shardy)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
