"""The benchmarks' own parts: the list of problems, the file, and one small run of it all."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
if not FOLDER.exists():
    pytest.skip("the benchmarks are not here", allow_module_level=True)


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def test_every_gpu_case_is_there():
    from problems import GPU

    found = {(p.shape, p.axis, p.dtype, p.a_dtype, p.a_shape, p.variant) for p in GPU}
    first = ((32, 4096, 256), (8, 2048, 2048), (4, 16384, 512))
    plain = (
        *first,
        *((4, 4096, 2560), (64, 1024, 512), (2, 4096, 4096)),
        *((1, 65536, 256), (1, 1048576, 64), (1, 262144, 16)),
        *((2, 4096, 64), (1, 2048, 1024), (16, 512, 128)),
        *((7, 4097, 255), (3, 1000, 33), (32, 4095, 1), (5, 3001, 3)),
        *((1, 2**k, 64) for k in range(12, 25)),
    )
    wanted = {(shape, 1, "float32", None, None, "plain") for shape in plain}
    time_last = ((1, 1, 1048576), (32, 256, 4096), (8, 1536, 65536))
    wanted |= {(shape, 2, "float32", None, None, "plain") for shape in time_last}
    for dtype in ("bfloat16", "float16", "float64", "complex64"):
        wanted |= {(shape, 1, dtype, None, None, "plain") for shape in first}
    wanted |= {(shape, 1, "bfloat16", "float32", None, "plain") for shape in first}
    for a_shape in ((256,), (4096, 256), (32, 4096, 1)):
        wanted.add((first[0], 1, "float32", None, a_shape, "plain"))
    for variant in ("reverse", "h0", "reset", "return_state"):
        wanted.add((first[0], 1, "float32", None, None, variant))
    assert wanted <= found


def test_bytes_that_have_to_be_moved():
    from problems import Problem

    plain = Problem("", (2, 8, 4), (0, 0))
    assert plain.moved_bytes("forward") == 3 * 256
    assert plain.moved_bytes("backward") == 5 * 256
    shared = plain._replace(a_shape=(4,), dtype="bfloat16", a_dtype="float32")
    assert shared.moved_bytes("forward") == 16 + 2 * 128
    assert shared.moved_bytes("backward") == 2 * 16 + 3 * 128


@pytest.mark.parametrize(("dtype", "a_dtype"), [("float32", None), ("bfloat16", "float32")])
def test_limits_move_as_much(dtype, a_dtype):
    import data
    import limits
    from problems import Problem

    problem = Problem("", (2, 8, 4), (0, 0), dtype=dtype, a_dtype=a_dtype)
    arrays = data.draw(problem)
    for direction, programs in (
        ("forward", limits.forward_programs(arrays, 1)),
        ("backward", limits.backward_programs(arrays, 1)),
    ):
        for program, args in programs.values():
            with jax.numpy_dtype_promotion("standard"):
                results = jax.tree.leaves(program(*args))
            # A chain returns its first result; of one call that is the only one.
            moved = sum(x.nbytes for x in (*jax.tree.leaves(args), *results))
            assert moved == problem.moved_bytes(direction)


def test_the_exact_scan_and_its_gradients():
    import exact

    rng = np.random.default_rng(0)
    a, b, g = (rng.standard_normal((37, 3)) for _ in range(3))
    a *= 0.5
    reset = rng.random((37, 3)) < 0.1
    h0, gstate = rng.standard_normal((2, 3))

    def loss(a, b, h0):
        h, total = h0, 0.0
        for t in range(37):
            h = np.where(reset[t], 0, a[t]) * h + b[t]
            total += np.sum(g[t] * h)
        return total + np.sum(gstate * h)

    found = exact.value_and_gradients(a, b, g, h0, reset, gstate)
    args = {"a": a, "b": b, "h0": h0}
    for name, at in (("a", (20, 1)), ("a", (0, 0)), ("b", (0, 2)), ("b", (36, 0)), ("h0", (1,))):
        step = np.zeros_like(args[name])
        step[at] = 1e-6
        change = loss(**{**args, name: args[name] + step}) - loss(
            **{**args, name: args[name] - step}
        )
        np.testing.assert_allclose(found[f"d{name}"][at], change / 2e-6, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="the limit on a CPU is a C++ program")
def test_a_run_and_its_continuation(tmp_path):
    out = tmp_path / "cpu.json"
    command = [sys.executable, str(FOLDER / "run.py"), "--cases", "small", "--out", str(out)]
    command += ["--cores", "1"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SCAN_COMMIT": "test"}
    subprocess.run(command, check=True, env=environment, timeout=200)
    report = json.loads(out.read_text())
    assert report["commit"] == "test"
    assert {"date", "device", "versions", "method"} <= report.keys()
    assert [row["direction"] for row in report["rows"]] == ["forward", "backward"]
    for row in report["rows"]:
        assert row["case"] == "small"
        assert row["shape"] == [2, 64, 16]
        assert (row["dtype"], row["variant"], row["cores"]) == ("float32", "plain", 1)
        assert row["max_rel_err"] < 1e-6
        assert row["ratio"] == pytest.approx(row["limit_us"] / row["ours_us"], rel=1e-2)
        assert row["peers"].keys() >= {"lax.associative_scan", "lax.scan", "NumPy"}
        assert max(row["peer_errors"].values()) < 1e-5
    subprocess.run([*command, "--continue"], check=True, env=environment, timeout=200)
    assert json.loads(out.read_text()) == report
