"""A few hundred of the random calls of `fuzz`, always the same ones by default.

JAX_SCAN_TEST_EXAMPLES in the environment sets how many, other ones each time. Those that once
failed are written out here.
"""

from __future__ import annotations

import os
import time

import pytest
from fuzz import batch

EXAMPLES = int(os.environ.get("JAX_SCAN_TEST_EXAMPLES", "0"))
PARTS = range(8)  # hypothesis varies what it has drawn: a few short runs see more than a long one


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_random_calls(part):
    count = max(EXAMPLES // len(PARTS), 1) if EXAMPLES else 30
    number = int(time.time()) + part if EXAMPLES else part
    done = batch(count, number, shrink=bool(EXAMPLES))
    print(dict(sorted(done.counts.items())))
    assert not done.failures, done.failures[0]
