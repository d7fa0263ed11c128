"""`python -m jax_scan`: what it prints, writes and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import numpy as np
import oracles
import pytest

import jax_scan
from jax_scan import __main__ as command

SHAPE = "--shape=2,33,5"


@pytest.fixture(autouse=True)
def jax_defaults():
    """The command is run as users run it, without the suite's strict settings."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield


def test_smoke(tmp_path):
    path = tmp_path / "report.json"
    arguments = [sys.executable, "-m", "jax_scan", SHAPE, "--json", str(path)]
    run = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,  # not the checkout, which may have no compiled modules
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for words in ("cpu kernel", "cuda kernel", "(2, 33, 5)", "32x4096x256", "All values are right"):
        assert words in run.stdout
    report = json.loads(path.read_text())
    assert report["ok"]
    assert report["shape"] == [2, 33, 5]
    assert report["environment"]["versions"]["jax"] == jax.__version__
    assert report["environment"]["kernels"] == jax_scan.kernels()
    assert len(report["checks"]) >= 3
    assert all(c["ok"] and c["largest_difference"] < 1e-4 for c in report["checks"])
    rows = {row["what"]: row for row in report["timings"]}
    assert list(rows) == ["elementwise limit", "jax_scan", "lax.associative_scan", "lax.scan"]
    assert all(row["forward_us"] > 0 and row["forward_backward_us"] > 0 for row in rows.values())


@pytest.mark.parametrize("what", ["h", "gradient", "nan"])
def test_wrong_value(monkeypatch, capsys, tmp_path, what):
    right = jax_scan.linear_scan

    def wrong(a, b):
        h = right(a, b)
        if what == "gradient":
            return h + 1e-3 * (a - jax.lax.stop_gradient(a))
        return h.at[1, 20, 3].add(1e-3 if what == "h" else np.nan)

    monkeypatch.setattr(jax_scan, "linear_scan", wrong)
    path = tmp_path / "report.json"
    assert command.main([SHAPE, "--json", str(path)]) == 1
    assert "A value is wrong" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert not report["ok"]
    bad = [check["what"].split()[0] for check in report["checks"] if not check["ok"]]
    assert bad[0] == ("da" if what == "gradient" else "h")


@pytest.mark.parametrize("shape", ["1,2", "1,2,x", "0,2,3"])
def test_bad_shape(shape, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--shape", shape])
    assert stopped.value.code == 2
    assert "--shape" in capsys.readouterr().err


def test_numpy_loop():
    rng = np.random.default_rng(0)
    problem = command.Problem(*(rng.normal(size=(2, 9, 3)).astype(np.float32) for _ in range(3)))
    h, da, db = command._numpy_loop(problem)
    oracle = oracles.Oracle(problem.a, problem.b)
    gradients = oracle.cotangents(problem.g)
    oracles.check(h, oracle.values()[0], "h")
    oracles.check(da, gradients["a"], "da")
    oracles.check(db, gradients["b"], "db")


def test_without_rich(tmp_path):
    (tmp_path / "rich.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'rich'\", name='rich')"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import jax_scan.__main__"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert run.returncode == 1
    assert run.stderr.strip().endswith("pip install 'jax_scan[cli]'")
    assert len(run.stderr.strip().splitlines()) == 1
