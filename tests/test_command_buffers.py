"""On a GPU: what a call launches, and that it lies inside the CUDA graphs that XLA captures.

Kernels are missing from a profile while another process has the GPU's tracer.
"""

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
KERNELS = (
    "boxed_kernel",
    "sequential_kernel",
    "cluster_kernel",
    "resident_kernel",
    "chained_kernel",
    "piped_kernel",
    "lined_kernel",
    "walked_kernel",
    "general_kernel",
    "sum_over_tiles_kernel",
)


def given():
    a, b, h0, _ = arguments(Case("", (4, 300, 64), h0=(4, 64)), "float64")
    return tuple(jnp.asarray(x) for x in (a, b, h0))


def loss(a, b, h0, scan=linear_scan):
    """Two scans and elementwise operations between them: ten operations with the gradient's."""
    h = scan(a, b, h0)
    return jnp.sum(jnp.sin(scan(a * 0.5, jnp.cos(h) + b)))


GRAD = jax.grad(loss, (0, 1, 2))


def profiled(f, x, calls, folder) -> dict[str, Counter[str]]:
    """What happens in so many calls: for each line of the profile, its events by name."""
    jax.block_until_ready(f(*x))
    with jax.profiler.trace(str(folder)):
        for _ in range(calls):
            jax.block_until_ready(f(*x))
    (file,) = folder.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(file))
    lines: dict[str, Counter[str]] = {}
    for plane in profile.planes:
        for line in plane.lines:
            found = lines.setdefault(f"{plane.name} {line.name}", Counter())
            found.update(e.name for e in line.events)
    return lines


def on_streams(lines: dict[str, Counter[str]]) -> dict[str, int]:
    """The package's kernels on each stream of the GPU that ran any."""
    counts = {
        line: sum(n for name, n in names.items() if any(k in name for k in KERNELS))
        for line, names in lines.items()
        if "Stream #" in line
    }
    return {line: n for line, n in counts.items() if n}


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
    """Graphs are launched, and hardly a kernel by itself."""
    calls = 20
    # Without the option XLA runs the operations one by one while a profiler looks on.
    options = {"xla_enable_command_buffers_during_profiling": True}
    f = jax.jit(GRAD, compiler_options=options)
    x = given()
    for _ in range(10):  # until the allocator hands out buffers that graphs exist for
        jax.block_until_ready(f(*x))
    names = sum(profiled(f, x, calls, tmp_path).values(), Counter())
    kernels = sum(n for name, n in names.items() if any(k in name for k in KERNELS))
    graphs = sum(n for name, n in names.items() if "GraphLaunch" in name)
    launches = sum(n for name, n in names.items() if re.match("cu(da)?LaunchKernel", name))
    seen = f"{kernels} kernels, {graphs} graphs, {launches} launches; {names.most_common(40)}"
    assert kernels == 0 or calls <= kernels < 100 * calls, seen
    assert graphs >= calls, seen
    assert launches < calls, seen


LAUNCHED = {
    "many channels": Case("", (8, 4096, 256)),
    "one channel": Case("", (1, 30000, 1)),
    "time last": Case("", (8, 5000), axis=-1),
    "shared a": Case("", (8, 4096, 64), a=(64,)),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_P1_launches_of_a_call(name, tmp_path):
    """A handful of kernels for a scan and its gradient, and no more if it is four times longer."""
    case, calls = LAUNCHED[name], 5
    f = jax.jit(lambda a, b: jax.vjp(partial(linear_scan, axis=case.axis), a, b)[1](b))
    for longer in (1, 4):
        shape = list(case.shape)
        shape[case.axis] *= longer
        given = arguments(case._replace(shape=tuple(shape)), "float32")
        found = on_streams(profiled(f, given[:2], calls, tmp_path / str(longer)))
        print(name, longer, found)
        assert sum(found.values()) <= 6 * calls, found


def test_X1_independent_scans_share_the_stream(tmp_path):
    """Kernels of two scans that nothing orders run on the stream that XLA gives, on no other."""
    a, b, _ = (x.astype(jnp.float32) for x in given())
    f = jax.jit(lambda a, b: (linear_scan(a, b), linear_scan(a * 0.5, b, reverse=True)))
    found = on_streams(profiled(f, (a, b), 5, tmp_path))
    print(found)
    assert len(found) <= 1, found
