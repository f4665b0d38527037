"""The plugin `kubectl pykubeproxy`: one module a command, imported on use."""

import importlib
from importlib.util import find_spec

import click

import pykubeproxy
from pykubeproxy.cli import terminal

# The function of each command, in the order of --help; its module has the same name.
_COMMANDS = {
    "trace": "trace",
    "explain": "explain",
    "diff": "diff",
    "dump-rules": "dump_rules",
    "status": "status",
    "check": "check",
    "bundle": "bundle",
}


class _LazyGroup(click.Group):
    """Import the module of a command on use, so that no command loads the libraries of others."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return [name for name, function in _COMMANDS.items() if find_spec(f"{__name__}.{function}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        function = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"{__name__}.{function}"), function)
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(
    pykubeproxy.__version__, prog_name="kubectl pykubeproxy", message="%(prog)s %(version)s"
)
def plugin() -> None:
    """Inspect the Services of a cluster whose proxies write iptables rules, from any machine.

    Read the rules of nodes through the API server, by exec into the pods of pykubeproxy or kube-proxy. Nothing on a node
    changes. Exec into such a pod equals root on its node.

    \b
    kubectl pykubeproxy trace pod/default/client svc/default/web:http
    kubectl pykubeproxy diff --all-nodes
    """
    terminal.guard()


def main() -> None:
    """Run the plugin as kubectl does."""
    plugin(prog_name="kubectl pykubeproxy")
