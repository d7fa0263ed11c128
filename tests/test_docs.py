"""What the documentation shows runs, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGES = sorted(TESTS.parent.glob("docs/*.md"))

pytestmark = pytest.mark.skipif(not PAGES, reason="tests without the rest of the source tree")


@pytest.mark.parametrize("name", ["transforms.md"])
def test_examples_run(name, python):
    text = (TESTS.parent / "docs" / name).read_text()
    examples = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        python(example)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_exist(page):
    """`file.py::test`, or `::test` for one more of the file named last."""
    file = None
    for name, test in re.findall(r"`(\w+\.py)?::(\w+)`", page.read_text()):
        file = name or file
        assert f"\ndef {test}(" in (TESTS / file).read_text(), f"{file} has no {test}"
