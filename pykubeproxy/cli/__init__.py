"""The command line: one module per command, imported on use."""

from importlib.util import find_spec

import click

import pykubeproxy
from pykubeproxy.cli import terminal
from pykubeproxy.cli.help import HELP, Option
from pykubeproxy.cli.lazy import LazyGroup

# The module and function of each command, by heading, in the order of --help.
_COMMANDS = {
    "Run a node": {
        "run": "pykubeproxy.cli.run:run",
        "check": "pykubeproxy.cli.check:check",
        "cleanup": "pykubeproxy.cli.cleanup:cleanup",
    },
    "Inspect rules": {
        "status": "pykubeproxy.cli.status:status",
        "trace": "pykubeproxy.cli.trace:trace",
        "explain": "pykubeproxy.cli.explain:explain",
        "diff": "pykubeproxy.cli.diff:diff",
        "dump-rules": "pykubeproxy.cli.dump_rules:dump_rules",
        "bundle": "pykubeproxy.cli.bundle:bundle",
    },
    "Without a node": {
        "render": "pykubeproxy.cli.render:render",
        "lab": "pykubeproxy.cli.lab:lab",
        "completion": "pykubeproxy.cli.completion:completion",
    },
}


def _no_lab() -> str:
    """Return why this installation has no lab, "" if it has; the container image omits it."""
    if find_spec("pykubeproxy.lab") is None:
        return "this installation has no lab; run it from a checkout"
    from pykubeproxy.kernel.errors import NotANode, require_lab

    try:
        require_lab()
    except NotANode as error:
        return str(error)
    return ""


@click.group(
    cls=LazyGroup,
    headings=_COMMANDS,
    unlisted={"flows": "pykubeproxy.cli.flows:flows", "probe": "pykubeproxy.cli.probe:probe"},
    absences={"lab": _no_lab},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(
    pykubeproxy.__version__, prog_name="pykubeproxy", message="%(prog)s %(version)s", cls=Option, group=HELP
)
def main() -> None:
    """Run and inspect a Kubernetes service proxy for iptables, a replacement for kube-proxy.

    These commands are about this node, files or a bundle. `kubectl pykubeproxy` asks a cluster about its nodes.

    \b
    Try it without a cluster:    sudo pykubeproxy lab demo
    Print the rules it writes:   pykubeproxy render -f objects.yaml
    """
    terminal.guard()
