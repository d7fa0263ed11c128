"""`jax.checkpoint`: the same gradients, and a policy under which no scan is run again."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import Case, arguments
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from oracles import same
from programs import calls, lax_scan

from jax_scan import linear_scan, save_scans

POLICIES: dict[str, Any] = {
    "none": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("h"),
    "scans": save_scans(),
    "scans and dots": save_scans(jax.checkpoint_policies.dots_saveable),
}


def given():
    a, b, h0, _ = arguments(Case("", (2, 16, 3), h0=(2, 3)), "float64")
    return tuple(jnp.asarray(x) for x in (a, b, h0))


def loss(a, b, h0, scan=linear_scan):
    h, state = scan(a, jnp.tanh(b), h0, return_state=True)
    return jnp.sum(jnp.sin(checkpoint_name(h, "h"))) + jnp.sum(state**2)


def all_same(actual, expected):
    jax.tree.map(same, actual, expected)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_T1_values_gradients_and_their_derivatives(policy):
    x = given()

    def everything(f):
        value, grads = jax.value_and_grad(f, (0, 1, 2))(*x)
        dots = jax.jvp(jax.grad(f, (0, 1, 2)), x, x)[1]
        twice = jax.grad(lambda *x: sum(jnp.sum(g**2) for g in jax.grad(f, (0, 1))(*x)), (0, 1))(*x)
        return value, grads, jax.jvp(f, x, x)[1], dots, twice

    again = jax.checkpoint(loss, policy=policy)
    expected = jax.jit(lambda: everything(partial(loss, scan=lax_scan)))()
    all_same(jax.jit(lambda: everything(again))(), expected)


# Under a policy: how often the scan runs for a value and its gradients.
@pytest.mark.parametrize(
    ("policy", "scans"),
    [
        ("none", 2),
        ("dots", 2),
        ("names", 2),
        ("everything", 1),
        ("scans", 1),
        ("scans and dots", 1),
    ],
)
def test_how_often_the_scan_runs(policy, scans):
    x = given()
    for f in (loss, jax.jit(loss), lambda a, b, h0: loss(a, jax.jit(jnp.cos)(b), h0)):
        layer = jax.checkpoint(f, policy=POLICIES[policy])
        found = [name for name, *_ in calls(jax.value_and_grad(layer, (0, 1, 2)), *x)]
        assert sorted(found) == ["cotangent"] + ["scan"] * scans


def test_a_scan_is_not_rerun_for_a_gradient_that_does_not_need_it():
    """Without da the gradient reads the factors alone: nothing to keep, nothing to run again."""
    a, b, h0 = given()
    layer = jax.checkpoint(lambda b: jnp.sum(linear_scan(a, b, h0)))
    assert calls(jax.value_and_grad(layer), b) == [
        ("scan", "a b h0", "h"),
        ("cotangent", "a g", "db"),
    ]


def test_save_scans_under_vmap_and_over_layers():
    """A stack of checkpointed layers in `lax.scan`: one scan forward, one cotangent backward."""
    a, b, _ = given()
    factors = jnp.stack([a, a * 0.5, a * 0.9])

    def network(policy):
        @jax.vmap
        def run(b, factors):
            def layer(x, a):
                return jnp.tanh(linear_scan(a, x) * jnp.cos(x)), None

            layer = jax.checkpoint(layer, policy=policy) if policy else layer
            return jnp.sum(lax.scan(layer, b, factors)[0])

        return lambda b, factors: jnp.sum(run(b, jnp.moveaxis(factors, 0, 1)))

    kept = jax.value_and_grad(network(save_scans()), (0, 1))
    all_same(
        jax.jit(kept)(b, factors), jax.jit(jax.value_and_grad(network(None), (0, 1)))(b, factors)
    )
    assert sorted(name for name, *_ in calls(kept, b, factors)) == ["cotangent", "scan"]
    rerun = jax.value_and_grad(network(jax.checkpoint_policies.nothing_saveable))
    assert sorted(name for name, *_ in calls(rerun, b, factors)) == ["cotangent", "scan", "scan"]


def test_save_scans_leaves_the_rest_to_an_offloading_policy():
    policy = save_scans(
        jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    )
    a, b, _ = given()
    w = jnp.eye(3)
    layer = jax.checkpoint(lambda w: jnp.sum(jnp.sin(linear_scan(a, b @ w) @ w)), policy=policy)
    program = str(jax.make_jaxpr(jax.grad(layer))(w))
    assert "pinned_host" in program or "Host" in program, program
    assert program.count("linear_scan[") == 1


def test_save_scans_is_the_same_policy_each_time():
    """A new object that differs from the last one would be traced again at each call."""
    dots = jax.checkpoint_policies.dots_saveable
    assert save_scans() == save_scans()
    assert hash(save_scans(dots)) == hash(save_scans(dots))
    assert save_scans() != save_scans(dots)


def test_save_scans_refuses_what_is_no_policy():
    with pytest.raises(TypeError, match=r"policy must be a function .* got 'dots' of type str"):
        save_scans("dots")  # type: ignore[arg-type]  # that is what it refuses
