"""The plugin `kubectl pykubeproxy`: one module a command, imported on use."""

import click

import pykubeproxy
from pykubeproxy.cli import terminal
from pykubeproxy.cli.help import HELP, Option
from pykubeproxy.cli.lazy import LazyGroup

_NAME = "kubectl pykubeproxy"
# The function of each command, by heading, in the order of --help; its module has the same name.
_COMMANDS = {
    "Follow connections": {"trace": "trace", "explain": "explain"},
    "Inspect nodes": {"diff": "diff", "status": "status", "check": "check", "dump-rules": "dump_rules"},
    "Save nodes": {"bundle": "bundle"},
}


@click.group(
    cls=LazyGroup,
    headings={
        heading: {name: f"{__name__}.{function}:{function}" for name, function in names.items()}
        for heading, names in _COMMANDS.items()
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(
    pykubeproxy.__version__, prog_name=_NAME, message="%(prog)s %(version)s", cls=Option, group=HELP
)
def plugin() -> None:
    """Inspect the Services of a cluster whose proxies write iptables rules, from any machine.

    This reads the rules of nodes through the API server, by exec into the pods of pykubeproxy or kube-proxy, and changes
    nothing on nodes. Exec into such a pod equals root on its node.

    \b
    kubectl pykubeproxy trace pod/default/client svc/default/web
    kubectl pykubeproxy diff --all-nodes
    """
    terminal.guard()


def main() -> None:
    """Run the plugin as kubectl does."""
    plugin(prog_name=_NAME)
