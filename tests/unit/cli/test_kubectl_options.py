"""Options that commands of the plugin share."""

from typing import Any

import click
import pytest
from click.testing import CliRunner

from pykubeproxy.cli.cluster import (
    ClusterOptions,
    cluster_options,
    namespace_option,
    node_option,
)
from pykubeproxy.cli.kubectl import plugin

SEEN: list[dict[str, Any]] = []


@click.command()
@node_option
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
        "nodes": ("a", "b"),
        "namespace": "ns",
        "cluster": ClusterOptions("", "c", at_once=3),
    }


@pytest.mark.parametrize(("text", "seconds"), [("5s", 5), ("7", 7), ("1m30s", 60), ("40s", 40), ("0", 60)])
def test_request_timeouts_as_kubectl_takes_them(text: str, seconds: float) -> None:
    assert given(some, "--request-timeout", text)["cluster"].request_timeout == seconds


@pytest.mark.parametrize("text", ["", "5x", "s", "-1"])
def test_a_duration_that_is_none_is_refused(text: str) -> None:
    assert CliRunner().invoke(some, ["--request-timeout", text]).exit_code == 2


def test_commands_about_whole_nodes_take_no_namespace() -> None:
    """It would change nothing."""
    with_namespace = {name for name in plugin.list_commands(click.Context(plugin)) if takes_namespace(name)}
    assert with_namespace == {"trace", "explain", "dump-rules"}


def takes_namespace(name: str) -> bool:
    command = plugin.get_command(click.Context(plugin), name)
    assert command
    return any(it.name == "namespace" for it in command.params)
