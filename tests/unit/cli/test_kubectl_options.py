"""Options that commands of the plugin share."""

from typing import Any

import click
from click.testing import CliRunner

from pykubeproxy.cli.cluster import (
    ClusterOptions,
    NodeSelection,
    cluster_options,
    namespace_option,
    node_options,
)
from pykubeproxy.cli.kubectl import plugin

SEEN: list[dict[str, Any]] = []


@click.command()
@node_options
@namespace_option
@cluster_options
def some(**arguments: Any) -> None:
    SEEN.append(arguments)


def given(command: click.Command, *arguments: str) -> dict[str, Any]:
    SEEN.clear()
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return SEEN[0]


def test_options_arrive_as_values() -> None:
    arguments = ("--node", "a", "--node", "b", "-n", "ns", "--context", "c", "--at-once", "3")
    assert given(some, *arguments) == {
        "nodes": NodeSelection(("a", "b"), everywhere=False),
        "namespace": "ns",
        "cluster": ClusterOptions("", "c", at_once=3),
    }


def test_commands_about_whole_nodes_take_no_namespace() -> None:
    """It would change nothing."""
    with_namespace = {name for name in plugin.list_commands(click.Context(plugin)) if takes_namespace(name)}
    assert with_namespace == {"trace", "explain", "dump-rules"}


def takes_namespace(name: str) -> bool:
    command = plugin.get_command(click.Context(plugin), name)
    assert command
    return any(it.name == "namespace" for it in command.params)
