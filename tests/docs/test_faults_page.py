"""The page on faults names a test for each."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs/operations/faults.md"
NAMED = re.compile(r"`((?:system|kernel|unit)/[\w/]+\.py)::(\w+)(?:\[(\w+)\])?`")


def rows() -> list[str]:
    """The lines of its tables that tell of a fault."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.startswith(("| fault |", "| --- |"))]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip())
def test_each_fault_has_a_test_that_exists(row: str) -> None:
    """With that name, in that file, and for that parameter if one is given."""
    (found,) = NAMED.findall(row)
    file, name, parameter = found
    text = (TESTS / file).read_text()
    functions = {it.name for it in ast.walk(ast.parse(text)) if isinstance(it, ast.FunctionDef)}
    assert name in functions
    assert not parameter or f'"{parameter}": Fault(' in text


def test_each_fault_of_the_api_server_is_on_the_page() -> None:
    """Those that the test goes through, by name."""
    text = (TESTS / "system/test_faults_api_server.py").read_text()
    tested = set(re.findall(r'"(\w+)": Fault\(', text))
    named = {parameter for row in rows() for _, _, parameter in NAMED.findall(row) if parameter}
    assert tested - named <= {"repeated"}  # the page names another test of that, which shows more
