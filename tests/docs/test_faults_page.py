"""Each row of the page on faults names the test that demonstrates it."""

import functools
import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs/operations/faults.md"
NAMED = re.compile(r"`((?:system|kernel|unit)/[\w/]+\.py)::(\w+)(?:\[(\w+)\])?`")


def rows() -> list[str]:
    """Return the rows of all tables of faults on the page."""
    tables = re.findall(r"^\| fault \|.*\n\| --- \|.*\n((?:\| .*\n)+)", PAGE.read_text(), re.MULTILINE)
    return "".join(tables).splitlines()


@functools.cache
def functions(file: str) -> set[str]:
    """Return the names of the tests in a file."""
    return set(re.findall(r"^def (\w+)\(", (TESTS / file).read_text(), re.MULTILINE))


def test_each_fault_has_a_test_that_exists() -> None:
    """The test exists in that file, and has that parameter if the row names one."""
    for row in rows():
        ((file, name, parameter),) = NAMED.findall(row)
        assert name in functions(file), row
        assert not parameter or f'"{parameter}": Fault(' in (TESTS / file).read_text(), row


def test_each_tested_fault_of_the_api_server_is_on_the_page() -> None:
    text = (TESTS / "system/test_faults_api_server.py").read_text()
    tested = set(re.findall(r'"(\w+)": Fault\(', text))
    named = {parameter for row in rows() for _, _, parameter in NAMED.findall(row) if parameter}
    assert tested - named <= {"repeated"}  # for this one, the page names a test that shows more
