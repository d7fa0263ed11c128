"""The targets that the compiled modules register, called by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scan import _native

SHAPE = (2, 5, 3)
X = np.ones(SHAPE, np.float32)
# Those of a scan of two operands of this shape, without h0.
ATTRIBUTES: dict[str, Any] = {
    "operands": "a b",
    "results": "h",
    "state": "float32",
    "axis": 1,
    "length": 5,
    "reverse": False,
    "has_h0": False,
    "time_last": False,
    "repeated": np.zeros(2, np.int64),
}
OPS = ("scan", "tangent", "cotangent")


def call(
    *args: Any,
    op: str = "scan",
    shapes: Sequence[tuple[tuple[int, ...], Any]] = ((SHAPE, np.float32),),
    workspace: int | None = None,
    without: Sequence[str] = (),
    **changed: Any,
) -> list[np.ndarray]:
    """What a target returns for these operands, with some attributes changed and some left out.

    `shapes` are those of the results, with their dtypes. On a GPU a workspace is added, of so many
    bytes or of as many as calls of this size need.
    """
    args = args or (X, X)
    attributes = ATTRIBUTES | {"repeated": np.zeros(len(args), np.int64)} | changed
    outs = list(shapes)
    if jax.default_backend() == "gpu" and workspace != 0:
        if workspace is None:
            module = _native.module("cuda")
            workspace = max(module.workspace_bytes(o, 8, 8, 8, "complex128") for o in OPS)
        outs.append(((workspace,), np.uint8))
        attributes["results"] = f"{attributes['results']} workspace"
    for name in without:
        del attributes[name]
    target = _native.TARGETS.get(op, op)
    f = jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct(*out) for out in outs])
    found = jax.jit(lambda *x: f(*x, **attributes))(*map(jnp.asarray, args))
    return [np.asarray(x) for x in found[: len(shapes)]]
