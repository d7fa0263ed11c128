"""Scans of other packages on a CUDA device, through torch, and the plain CUDA baselines.

All are captured in CUDA graphs and work on the very arrays that ours gets; each has the layout and
the form of the factors that it likes best, prepared outside the measurement.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import native
from limits import captured

if TYPE_CHECKING:
    from collections.abc import Callable

    from data import Data
    from problems import Problem
    from timing import Timed

# Compiling a warp kernel takes a minute.
_WARP = os.environ.get("JAX_SCAN_BENCHMARK_WARP") == "1"


class Peer(NamedTuple):
    """A scan of torch tensors a and b of shape (B, L, D), or (B, D, L) where time is last."""

    scan: Callable[..., Any]  # of what `prepare` returns
    prepare: Callable[..., tuple[Any, ...]] = lambda a, b: (a, b)
    finish: Callable[[Any], Any] = lambda h: h  # from its result, or a gradient, to b's shape
    factor: Callable[[Any, Any], Any] = lambda da, a: da  # from its first gradient to da
    backward: bool = True


def measurements(problem: Problem, data: Data, direction: str) -> Any:
    """By name a Timed and what it computed: {name: (Timed, {what: tensor})}. One at a time."""
    import torch

    a, b, g = (torch.from_dlpack(x) for x in (data.a, data.b, data.g))
    calls = 20 if problem.short else 2
    for name, peer in _peers(problem).items():
        if direction == "backward" and not peer.backward:
            continue
        try:
            with torch.cuda.stream(_stream()):
                found = _measurement(peer, a, b, g, direction, calls)
            torch.cuda.synchronize()
            yield name, *found
        except Exception as error:  # whatever may go wrong in another's package
            print(f"{name} failed: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        torch.cuda.empty_cache()


@functools.cache
def _stream() -> Any:
    import torch

    return torch.cuda.Stream()


def _measurement(
    peer: Peer, a: Any, b: Any, g: Any, direction: str, calls: int
) -> tuple[Timed, dict[str, Any]]:
    import torch

    inputs = peer.prepare(a, b)
    if direction == "forward":
        timed = captured(functools.partial(peer.scan, *inputs), calls)
        return timed, {"h": peer.finish(peer.scan(*inputs)).contiguous()}
    for x in inputs:
        x.requires_grad_()
    h = peer.scan(*inputs)
    # The shape that the peer's own result has.
    cotangent = peer.prepare(torch.ones_like(g), g)[1]
    gradients = functools.partial(torch.autograd.grad, h, inputs, cotangent, retain_graph=True)
    timed = captured(gradients, calls)
    da, db = gradients()
    da, db = (peer.finish(x) for x in (da, db))
    return timed, {"da": peer.factor(da, a).contiguous(), "db": db.contiguous()}


def _peers(problem: Problem) -> dict[str, Peer]:
    if problem.peers != "all" or problem.dtype != "float32" or len(problem.shape) != 3:
        return {}
    found: dict[str, Peer] = {}
    time_last = problem.axis == 2

    def swap(x: Any) -> Any:
        return x if time_last else x.transpose(1, 2)

    if importlib.util.find_spec("accelerated_scan"):
        modules = {"Triton": "accelerated_scan.scalar"}
        length = problem.length
        if _WARP and 32 <= length <= 65536 and length & (length - 1) == 0:
            modules["warp"] = "accelerated_scan.warp"
        for kind, module in modules.items():
            scan = importlib.import_module(module).scan
            found[f"accelerated-scan {kind}"] = Peer(
                scan, lambda a, b: (swap(a).contiguous(), swap(b).contiguous()), swap
            )
    if time_last:
        return found
    # Its kernels are compiled anew, in several variants, for each number of channels.
    if importlib.util.find_spec("fla") and problem.shape[2] <= 256:
        hgrn = importlib.import_module("fla.ops.hgrn.chunk").chunk_hgrn
        found["FLA chunk_hgrn"] = Peer(
            lambda log_a, b: hgrn(b, log_a)[0],
            lambda a, b: (a.log(), b.clone()),
            factor=lambda da, a: da / a,
        )
    if problem.shape == (32, 4096, 256):  # compiles for ten seconds
        found["torch.compile associative_scan"] = Peer(_compiled_scan(), backward=False)
    for name in ("thread per channel", "tiles", "three passes"):
        if name != "thread per channel" or problem.length <= 1 << 16:
            found[f"CUDA {name}"] = Peer(_baseline(name.replace(" ", "_")), backward=False)
    return found


def _compiled_scan() -> Callable[..., Any]:
    import torch

    scan = importlib.import_module("torch._higher_order_ops.associative_scan").associative_scan

    def compose(first: Any, then: Any) -> Any:
        return then[0] * first[0], then[0] * first[1] + then[1]

    return torch.compile(lambda a, b: scan(compose, (a, b), dim=1)[1], dynamic=False)


def _library() -> ctypes.CDLL:
    library = native.build("baselines.cu")
    if library is None:
        raise RuntimeError("there is no nvcc here")
    library.workspace_bytes.restype = ctypes.c_int64
    library.workspace_bytes.argtypes = [ctypes.c_int64] * 3
    return library


def _baseline(name: str) -> Callable[[Any, Any], Any]:
    import torch

    def scan(a: Any, b: Any) -> Any:
        library = _library()
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
        h = torch.empty_like(b)
        size = library.workspace_bytes(*b.shape)
        workspace = torch.empty(size, dtype=torch.uint8, device=b.device)
        pointers = (x.data_ptr() for x in (a, b, h, workspace))
        error = function(*pointers, *b.shape, torch.cuda.current_stream().cuda_stream)
        if error:
            raise RuntimeError(f"CUDA error {error}")
        return h

    return scan
