"""Options that commands of the plugin share."""

from typing import Any

import click
import pytest
from click.testing import CliRunner

from pykubeproxy.cli.kubectl.options import (
    Connection,
    NodeNames,
    Reading,
    connection_options,
    node_options,
    optional_node_options,
    reading_options,
)

SEEN: list[dict[str, Any]] = []


@click.command()
@node_options
@connection_options
@reading_options
def some(**arguments: Any) -> None:
    SEEN.append(arguments)


@click.command()
@optional_node_options
def about(**arguments: Any) -> None:
    SEEN.append(arguments)


def given(command: click.Command, *arguments: str) -> dict[str, Any]:
    SEEN.clear()
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return SEEN[0]


def test_options_arrive_as_values() -> None:
    arguments = ("--node", "a", "--node", "b", "-n", "ns", "--context", "c", "--at-once", "3")
    assert given(some, *arguments) == {
        "nodes": NodeNames(("a", "b"), everywhere=False),
        "connection": Connection("", "c", "ns"),
        "reading": Reading("", "", 3),
    }


@pytest.mark.parametrize(("arguments", "everywhere"), [((), True), (("--node", "a"), False)])
def test_command_is_about_all_nodes_by_default(arguments: tuple[str, ...], everywhere: bool) -> None:
    assert given(about, *arguments)["nodes"].everywhere is everywhere
