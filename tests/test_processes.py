"""Several processes, each with some of the devices of one mesh."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

# Each of two processes has two CPU devices. Both make the same whole arrays, put on their devices
# what belongs there, and compare what comes back to loops in float64.
WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address, index = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, num_processes=2, process_id=index)

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from cases import Case, arguments
from devices import collectives
from oracles import Expected, Oracle, check
from jax_scan import linear_scan, sequence_parallel_scan

assert jax.process_count() == 2 and len(jax.devices()) == 4 and len(jax.local_devices()) == 2
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

def put(x, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

def check_shards(x, expected):
    for shard in x.addressable_shards:
        check(shard.data, Expected(expected.value[shard.index], expected.bound[shard.index]))

case = Case("", (4, 32, 6), h0=(4, 6), reset=(4, 32))
a, b, h0, reset = arguments(case)
oracle = Oracle(a, b, h0, reset=reset)
values = oracle.values()
cotangents = list(oracle.cotangents(b).values())

def run(scan, spec, step):
    def both(a, b, h0, reset):
        def f(a, b, h0):
            return scan(a, b, h0, reset=reset, return_state=True)
        out, pull = jax.vjp(f, a, b, h0)
        return out, pull((b, jnp.zeros_like(out[1])))
    args = put(a, spec), put(b, spec), put(h0, step), put(reset, spec)
    compiled = jax.jit(both).lower(*args).compile()
    out, gradients = compiled(*args)
    for x, expected in zip((*out, *gradients), (*values, *cotangents), strict=True):
        check_shards(x, expected)
    return collectives(compiled.as_text())

assert run(linear_scan, P("x"), P("x")) == []
assert run(linear_scan, P(None, None, None), P()) == []

def over_time(*args, **options):
    sharding = NamedSharding(mesh, P(None, "x"))
    return sequence_parallel_scan(*args, sharding=sharding, **options)

sent = run(over_time, P(None, "x"), P())
assert {name for name, _ in sent} == {"all-gather", "reduce-scatter", "all-reduce"}, sent
print("right", index)
"""


def test_S3_two_processes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    worker = tmp_path / "worker.py"
    worker.write_text(textwrap.dedent(WORKER))
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    # A proxy would be asked for the other process.
    environment |= {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(worker), address, str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=150) for process in started]
    finally:
        for process in started:
            process.kill()
    for index, (process, (out, err)) in enumerate(zip(started, outputs, strict=True)):
        assert process.returncode == 0, err
        assert f"right {index}" in out
