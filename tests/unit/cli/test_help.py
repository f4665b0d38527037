"""--help in a terminal of 80 columns."""

import click
import pytest
from click.testing import CliRunner

from pykubeproxy.cli import main
from pykubeproxy.cli.lab import lab

_GROUPS = [pytest.param((), main, id="main"), pytest.param(("lab",), lab, id="lab")]


@pytest.mark.parametrize(("path", "group"), _GROUPS)
def test_lists_of_commands(path: tuple[str, ...], group: click.Group) -> None:
    """Each command has a whole sentence on one line."""
    text = CliRunner().invoke(main, [*path, "--help"], terminal_width=80).stdout
    lines = text.partition("Commands:\n")[2].splitlines()
    assert len(lines) == len(group.list_commands(click.Context(group)))
    for line in lines:
        assert line.endswith(".") and not line.endswith("...") and len(line) <= 80


def test_examples() -> None:
    """No help text is wider than the terminal."""
    for name in main.list_commands(click.Context(main)):
        text = CliRunner().invoke(main, [name, "--help"], terminal_width=80).stdout
        assert [line for line in text.splitlines() if len(line) > 80] == []
