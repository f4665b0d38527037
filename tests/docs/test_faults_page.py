"""Each row of the page on faults names the test that demonstrates it."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs/operations/faults.md"
NAMED = re.compile(r"`((?:system|kernel|unit)/[\w/]+\.py)::(\w+)(?:\[(\w+)\])?`")


def rows() -> list[str]:
    """Return the rows of all tables of faults on the page."""
    tables = re.findall(r"^\| fault \|.*\n\| --- \|.*\n((?:\| .*\n)+)", PAGE.read_text(), re.MULTILINE)
    return "".join(tables).splitlines()


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip())
def test_each_fault_has_a_test_that_exists(row: str) -> None:
    """The test exists in that file, and has that parameter if the row names one."""
    ((file, name, parameter),) = NAMED.findall(row)
    text = (TESTS / file).read_text()
    functions = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    assert name in functions
    assert not parameter or f'"{parameter}": Fault(' in text


def test_each_tested_fault_of_the_api_server_is_on_the_page() -> None:
    text = (TESTS / "system/test_faults_api_server.py").read_text()
    tested = set(re.findall(r'"(\w+)": Fault\(', text))
    named = {parameter for row in rows() for _, _, parameter in NAMED.findall(row) if parameter}
    assert tested - named <= {"repeated"}  # for this one, the page names a test that shows more
