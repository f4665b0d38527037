"""The plugin `kubectl pykubeproxy`: its commands, imported on use."""

import click

import pykubeproxy
from pykubeproxy.cli import terminal
from pykubeproxy.cli.help import HELP, Option
from pykubeproxy.cli.lazy import LazyGroup

_NAME = "kubectl pykubeproxy"
# The module and function of each command, by heading, in the order of --help.
_COMMANDS = {
    "Follow connections": {
        "trace": "pykubeproxy.cli.trace:trace_over_nodes",
        "explain": "pykubeproxy.cli.explain:explain_on_nodes",
    },
    "Inspect nodes": {
        "diff": "pykubeproxy.cli.diff:diff_of_nodes",
        "status": "pykubeproxy.cli.status:status_of_nodes",
        "check": "pykubeproxy.cli.check:check_nodes",
        "dump-rules": "pykubeproxy.cli.dump_rules:dump_rules_of_nodes",
    },
    "Save nodes": {
        "bundle": "pykubeproxy.cli.bundle:bundle_of_nodes",
    },
}


@click.group(
    cls=LazyGroup,
    headings=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(
    pykubeproxy.__version__, prog_name=_NAME, message="%(prog)s %(version)s", cls=Option, group=HELP
)
def plugin() -> None:
    """Inspect the Services of a cluster, and the rules that kube-proxy or pykubeproxy writes for them, from any machine.

    This reads the rules of nodes through the API server, by exec into the pods of pykubeproxy or kube-proxy, and changes
    nothing on nodes. Exec into such a pod equals root on its node.

    \b
    kubectl pykubeproxy trace pod/default/client svc/default/web
    kubectl pykubeproxy diff
    """
    terminal.guard()


def main() -> None:
    """Run the plugin as kubectl does."""
    plugin(prog_name=_NAME)
