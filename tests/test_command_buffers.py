"""On a GPU: the calls lie inside CUDA graphs that XLA captures, with the operations around them."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import Case, arguments
from oracles import same
from programs import lax_scan

from jax_scan import linear_scan

pytestmark = pytest.mark.gpu

# The kernels' names in cuda/.
KERNELS = ("sequential_kernel", "lookback_kernel")


def given():
    a, b, h0, _ = arguments(Case("", (4, 300, 64), h0=(4, 64)), "float64")
    return tuple(jnp.asarray(x) for x in (a, b, h0))


def loss(a, b, h0, scan=linear_scan):
    """Two scans and elementwise operations between them: ten operations with the gradient's."""
    h = scan(a, b, h0)
    return jnp.sum(jnp.sin(scan(a * 0.5, jnp.cos(h) + b)))


GRAD = jax.grad(loss, (0, 1, 2))


def test_X1_every_call_is_recorded(tmp_path):
    """XLA's own list of what it runs: custom calls stand under command buffers, none outside.

    With its default options, by which a graph has at least five operations.
    """
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    result = jax.jit(GRAD, compiler_options=options)(*given())
    jax.tree.map(same, result, jax.grad(partial(loss, scan=lax_scan), (0, 1, 2))(*given()))

    def operations(text: str) -> list[tuple[str, str]]:
        """Lines are "<indent><index>: <kind> ..."; what a command buffer holds is indented."""
        return re.findall(r"^( *)\d+: (\w+)", text, re.MULTILINE)

    before = next(tmp_path.glob("*jit_loss*.thunk_sequence.txt")).read_text()
    assert [kind for _, kind in operations(before)].count("kCustomCall") == 4, before
    after = list(tmp_path.glob("*jit_loss*thunk_sequence_after_thunk_passes*.txt"))
    assert after, f"No command buffer was made of\n{before}"
    text = after[0].read_text()
    inside = [kind for indent, kind in operations(text) if indent]
    outside = [kind for indent, kind in operations(text) if not indent]
    assert "kCommandBuffer" in outside, text
    assert inside.count("kCustomCall") == 4, text
    assert "kCustomCall" not in outside, text


def test_X1_a_profile_shows_graphs(tmp_path):
    """Graphs are launched, and hardly a kernel by itself.

    The kernels themselves are missing from a profile while another process has the GPU's tracer.
    """
    calls = 20
    # Without the option XLA runs the operations one by one while a profiler looks on.
    options = {"xla_enable_command_buffers_during_profiling": True}
    f = jax.jit(GRAD, compiler_options=options)
    x = given()
    for _ in range(10):  # until the allocator hands out buffers that graphs exist for
        jax.block_until_ready(f(*x))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(calls):
            jax.block_until_ready(f(*x))
    (file,) = tmp_path.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(file))
    names = Counter(e.name for plane in profile.planes for line in plane.lines for e in line.events)
    kernels = sum(n for name, n in names.items() if any(k in name for k in KERNELS))
    graphs = sum(n for name, n in names.items() if "GraphLaunch" in name)
    launches = sum(n for name, n in names.items() if re.match("cu(da)?LaunchKernel", name))
    seen = f"{kernels} kernels, {graphs} graphs, {launches} launches; {names.most_common(40)}"
    assert kernels in (0, *range(4 * calls, 100 * calls)), seen
    assert graphs >= calls, seen
    assert launches < calls, seen
