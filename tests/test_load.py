"""Many calls: from threads, processes and streams, one after the other, and when memory is short.

JAX_SCAN_TEST_LOAD=1 in the environment asks for all of them; by default there are a tenth.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments
from oracles import Oracle, check
from programs import lax_scan

from jax_scan import linear_scan

FULL = os.environ.get("JAX_SCAN_TEST_LOAD") == "1"


def times(full: int) -> int:
    return full if FULL else full // 10


def started(*scripts: str, env: dict[str, str] | None = None) -> list[str]:
    """Runs Python programs on the default device, all at once; warnings are errors."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
            env=environment | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for script in scripts
    ]
    try:
        outputs = [process.communicate(timeout=250) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, err) in zip(running, outputs, strict=True):
        assert process.returncode == 0, err
    return [out for out, _ in outputs]


@jax.jit
def equal(x: Any, y: Any) -> jax.Array:
    """Bit by bit, of trees without NaNs and zeros of both signs."""
    return jnp.stack([jnp.all(p == q) for p, q in zip(*map(jax.tree.leaves, (x, y)), strict=True)])


def loss(scan: Callable, a: Any, b: Any) -> jax.Array:
    """Two scans with operations around them."""
    return jnp.sum(jnp.sin(scan(a * 0.5, jnp.cos(scan(a, b)) + b)))


VALUE = jax.jit(linear_scan)
GRAD = jax.jit(jax.grad(partial(loss, linear_scan), (0, 1)))


@contextlib.contextmanager
def busy(threads: int = 2) -> Iterator[None]:
    """Other threads keep the device at work meanwhile: scans of their own and matrix products."""
    done = threading.Event()
    a, b, *_ = arguments(Case("", (4, 3000, 33)), seed=7)
    square = jnp.ones((256, 256), jnp.float32) / 256
    errors: list[BaseException] = []

    @jax.jit
    def work(a, b, x):
        return linear_scan(a, b), linear_scan(a, b, reverse=True), x @ x

    def run() -> None:
        try:
            while not done.is_set():
                jax.block_until_ready(work(a, b, square))
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in running:
            thread.join(60)
    assert not any(thread.is_alive() for thread in running)
    assert not errors, errors


# ---- Threads, streams, graphs --------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 256, 8), (4, 1024, 32)])
def test_X4_many_threads(shape):
    """16 host threads, each with problems of its own: a value, and two scans in a larger jit.

    On a CPU the first are too small to be shared between cores, the second are not.
    """
    problems = [arguments(Case("", shape), seed=k)[:2] for k in range(16)]
    for a, b in problems[:2]:
        check(VALUE(a, b), Oracle(a, b).values()[0])
    expected = [(VALUE(*x), GRAD(*x)) for x in problems]

    def work(k: int) -> bool:
        x = [jnp.asarray(y) for y in problems[k]]
        got = [equal((VALUE(*x), GRAD(*x)), expected[k]) for _ in range(times(500))]
        return bool(np.all(got))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


REPEATED = {
    "many steps": Case("", (4, 10000, 64)),
    "one channel": Case("", (1, 30000, 1), reverse=True),
    "shared a": Case("", (64, 300, 33), a=(33,)),
    "time last": Case("", (8, 3000), axis=-1),
}


@pytest.mark.parametrize("name", REPEATED)
def test_V3_bitwise_equal_under_load(name):
    """A thousand runs of value and gradient while other calls share the device."""
    case = REPEATED[name]
    a, b, *_ = (jnp.asarray(x) for x in arguments(case)[:2])

    def run(a, b):
        out, pull = jax.vjp(partial(linear_scan, axis=case.axis, reverse=case.reverse), a, b)
        return out, pull(jnp.cos(b))

    f = jax.jit(run)
    first = f(a, b)
    check(first[0], Oracle(a, b, axis=case.axis, reverse=case.reverse).values()[0])
    with busy():
        got = [equal(f(a, b), first) for _ in range(times(1000))]
        assert np.all(got)


def test_X1_replays_with_other_buffers():
    """A graph that XLA has captured reads and writes wherever the buffers of the call lie."""
    case = Case("", (4, 300, 64))
    problems = [[jnp.asarray(x) for x in arguments(case, seed=k)[:2]] for k in range(8)]
    both = jax.jit(
        lambda a, b: (jax.grad(partial(loss, linear_scan), (0, 1))(a, b), loss(linear_scan, a, b))
    )
    expected = [both(*x) for x in problems]
    exact = jax.jit(jax.grad(partial(loss, lax_scan), (0, 1)))
    for x, (grads, _) in zip(problems[:2], expected, strict=False):
        for one, other in zip(grads, exact(*(y.astype(np.float64) for y in x)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    kept, got = [], []
    for k in range(times(1000)):
        # Results that live for a while move those of the next calls.
        kept = [*kept[-(k % 7) :], both(*problems[k % 8])]
        got.append(equal(kept[-1], expected[k % 8]))
    assert np.all(got)


def test_X1_independent_scans_in_one_jit():
    """Nothing orders them but the stream that XLA gives to each call."""
    x = [jnp.asarray(y) for y in arguments(Case("", (2, 2000, 16)))[:2]]

    @jax.jit
    def many(a, b):
        return [
            linear_scan(a * c, b + c, reverse=k % 2 == 1) for k, c in enumerate((0.5, 0.9, 1, 0.7))
        ]

    first = many(*x)
    for k, c in enumerate((0.5, 0.9, 1, 0.7)):
        a, b = np.float32(c) * np.asarray(x[0]), np.asarray(x[1]) + np.float32(c)
        check(first[k], Oracle(a, b, reverse=k % 2 == 1).values()[0])
    assert np.all([equal(many(*x), first) for _ in range(times(500))])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_D4_torch_on_several_streams():
    """Producers and consumers on torch's side streams, JAX's own work in between, from threads."""
    torch = pytest.importorskip("torch", exc_type=ModuleNotFoundError)
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
    from jax_scan.torch import linear_scan as scan

    problems = [arguments(Case("", (4, 1000, 64)), seed=k)[:2] for k in range(4)]
    on_torch = [[torch.from_numpy(x).cuda() for x in p] for p in problems]
    expected = [torch.from_numpy(np.array(VALUE(*p))).cuda() * 2 for p in problems]
    torch.cuda.synchronize()

    def work(k: int) -> bool:
        stream, wrong = torch.cuda.Stream(), []
        with torch.cuda.stream(stream):
            for _ in range(times(500)):
                a, b = (x * 1 for x in on_torch[k])
                h = scan(a, b) * 2
                a.fill_(float("nan"))
                b.fill_(float("nan"))
                wrong.append((h != expected[k]).sum())
                jax_side = VALUE(*problems[k])
            total = torch.stack(wrong).sum()
        stream.synchronize()
        jax.block_until_ready(jax_side)
        return total.item() == 0

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


# ---- Processes -----------------------------------------------------------------------------------


def test_X5_two_processes_on_one_device():
    script = f"""
    import jax, numpy as np
    from functools import partial
    from cases import Case, arguments
    from oracles import Oracle, check
    from jax_scan import linear_scan
    for seed in range(3):
        for case in (Case("", (2, 500, 33)), Case("", (1, 20000, 3), reverse=True)):
            a, b, *_ = arguments(case, seed=seed)
            f = jax.jit(partial(linear_scan, reverse=case.reverse))
            first = f(a, b)
            check(first, Oracle(a, b, reverse=case.reverse).values()[0])
            for _ in range({times(200)}):
                assert np.array_equal(f(a, b), first)
    print("right")
    """
    assert started(script, script) == ["right\n"] * 2


def test_X8_fork_after_import():
    """Importing starts nothing: parent and child may both use the device afterwards."""
    script = """
    import os
    import numpy as np
    import jax_scan
    child = os.fork()
    assert list(jax_scan.linear_scan(2.0, np.ones(3), axis=-1)) == [1, 3, 7]
    if child == 0:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert started(script) == ["7\n"]


def test_X8_import_opens_no_device():
    """No backend starts, and no file of the driver's is open: there is no CUDA context."""
    script = """
    import os
    import jax_scan
    from jax._src import xla_bridge
    files = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
             if os.path.lexists(f"/proc/self/fd/{n}")]
    print(xla_bridge.backends_are_initialized(), [f for f in files if "nvidia" in f])
    """
    assert started(script) == ["False []\n"]


def test_X8_spawn_after_use(tmp_path):
    """Children started afresh work, also from a parent whose backend runs."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import multiprocessing
            import numpy as np
            from jax_scan import linear_scan

            def work(factor):
                return np.asarray(linear_scan(factor, np.ones(3), axis=-1)).tolist()

            if __name__ == "__main__":
                assert work(2.0) == [1, 3, 7]
                with multiprocessing.get_context("spawn").Pool(2) as pool:
                    print(pool.map(work, [2.0, 3.0]))
            """
        )
    )
    run = f"import runpy, sys; sys.argv = [{str(program)!r}]; sys.path.insert(0, {str(tmp_path)!r})"
    assert started(f"{run}\nrunpy.run_path({str(program)!r}, run_name='__main__')") == [
        "[[1.0, 3.0, 7.0], [1.0, 4.0, 13.0]]\n"
    ]


# ---- Memory --------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes that this process holds: of the GPU, or of the host."""
    if jax.default_backend() == "gpu":
        return jax.local_devices()[0].memory_stats()["bytes_in_use"]
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def refused(a: Any) -> None:
    with pytest.raises(ValueError, match="does not broadcast"):
        linear_scan(a, a[:1, :1])


CALLS = {
    "jitted": VALUE,
    "eager": linear_scan,
    "gradient": GRAD,
    "mapped": jax.vmap(linear_scan),
    "refused": lambda a, b: refused(a),
}


@pytest.mark.parametrize("name", [*CALLS, "torch"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_memory_is_flat(name):
    """Ten thousand calls leave nothing behind; those that take longer, a tenth by default."""
    x: Any = [jnp.asarray(y) for y in arguments(Case("", (2, 64, 8)))[:2]]
    if name == "torch":
        torch = pytest.importorskip("torch", exc_type=ModuleNotFoundError)
        from jax_scan.torch import linear_scan as call

        device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        x = [torch.tensor(np.asarray(y), device=device, requires_grad=True) for y in x]

        def f(a, b):
            return torch.autograd.grad(call(a, b).sum(), (a, b))[0]

    else:
        f = CALLS[name]
    many = 2000 if name in ("jitted", "eager", "gradient") else times(2000)
    seen = []
    for _ in range(5):
        for _ in range(many):
            out = f(*x)
        if name == "torch" and device == "cuda":
            torch.cuda.synchronize()
        elif name not in ("torch", "refused"):
            jax.block_until_ready(out)
        del out
        gc.collect()
        seen.append(resident())
    # The first rounds fill caches. Results have 4 kB: if each stayed, it would show twice over.
    assert min(seen[3:]) - max(seen[:2]) < 2**20, seen


def test_X6_a_result_that_no_memory_holds():
    """16 TiB are refused in Python, and the next call works."""
    huge = jax.jit(lambda a: linear_scan(a, jnp.ones(2**43, jnp.bfloat16), axis=-1)[-1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        jax.block_until_ready(huge(jnp.bfloat16(0.5)))
    check(*small())


def small() -> tuple[Any, Any]:
    a, b, *_ = arguments(Case("", (2, 500, 33)))
    return VALUE(a, b), Oracle(a, b).values()[0]


@pytest.mark.gpu
def test_X6_device_memory_nearly_full():
    """With less left than a call needs, for its results or what it works in, Python gets an error.

    Never a result that is not written; and with room again the same call works. JAX waits ten
    seconds for memory before it gives up.
    """
    script = """
    import jax, jax.numpy as jnp, numpy as np
    from cases import Case, arguments
    from oracles import Oracle, check
    from jax_scan import linear_scan

    MIB = 2**20
    device = jax.devices()[0]
    assert device.memory_stats()["bytes_limit"] < 4096 * MIB  # others use this device too
    # A MiB in each array, and some in the workspace.
    a, b, *_ = (jnp.asarray(x) for x in arguments(Case("", (1, 2**15, 8)))[:2])
    run = jax.jit(lambda a, b: jax.vjp(linear_scan, a, b)[1](b))
    expected = [np.asarray(x) for x in run(a, b)]
    check(expected[0], Oracle(a, b).cotangents(b)["a"])

    failed = []
    for spare in (0, 1.5, 2.5, 3.25, 6, 64):
        # The allocator would not split off less than 128 MiB: what is to be left is made first.
        left = jax.block_until_ready(jnp.zeros(int(spare * MIB), jnp.uint8))
        stats = device.memory_stats()
        free = stats.get("largest_free_block_bytes") or stats["bytes_limit"] - stats["bytes_in_use"]
        hold = jax.block_until_ready(jnp.zeros(free // 256 * 256, jnp.uint8))
        del left
        try:
            out = [np.asarray(x) for x in run(a, b)]
        except jax.errors.JaxRuntimeError as error:
            assert "RESOURCE_EXHAUSTED" in str(error), error
            failed.append(spare)
        else:
            assert all(map(np.array_equal, out, expected)), spare
        del hold
        assert all(map(np.array_equal, run(a, b), expected)), spare
    assert 0 in failed and 64 not in failed, failed
    print(failed)
    """
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.015"}
    print(*started(script, env=env))
