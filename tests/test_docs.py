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


def named(text: str) -> list[tuple[str, str]]:
    """Tests that a text names: `file.py::test`, or `::test` for one more of the file named last.

    A `*` at the end stands for all tests whose names begin so.
    """
    file, found = None, []
    for name, test in re.findall(r"`(\w+\.py)?::(\w+\*?)`", text):
        file = name or file
        found.append((file, test))
    return found


def defined_in(file: str) -> list[str]:
    return re.findall(r"^def (test_\w+)", (TESTS / file).read_text(), re.MULTILINE)


def matches(pattern: str, test: str) -> bool:
    return test.startswith(pattern[:-1]) if pattern.endswith("*") else test == pattern


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_exist(page):
    for file, pattern in named(page.read_text()):
        assert any(matches(pattern, test) for test in defined_in(file)), f"{file} has no {pattern}"


def test_every_kind_of_fault_has_its_tests():
    """The codes in tests' names and the table of docs/testing.md name each other."""
    text = (TESTS.parent / "docs" / "testing.md").read_text()
    rows = dict(re.findall(r"^\| ([A-Z]\d) \| (.*)$", text, re.MULTILINE))
    table = {code: named(row) for code, row in rows.items()}
    missing = []
    for path in sorted(TESTS.glob("test_*.py")):
        for test in defined_in(path.name):
            for code in re.findall(
                r"[A-Z]\d(?=_)", re.sub(r"^test_((?:[A-Z]\d_)*).*", r"\1", test)
            ):
                patterns = [p for file, p in table.get(code, []) if file == path.name]
                if not any(matches(p, test) for p in patterns):
                    missing.append(f"{code}: {path.name}::{test}")
    assert not missing, "not in the table of docs/testing.md: " + ", ".join(missing)
    for code, tests in table.items():
        assert any(re.match(rf"test_(?:[A-Z]\d_)*{code}_", test) for _, test in tests), code
