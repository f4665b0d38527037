"""The command line: one module a command, imported on use."""

import importlib
import os
import signal
from importlib.util import find_spec

import click

import pykubeproxy
from pykubeproxy.cli import terminal

# The module and function of each command, in the order of --help.
_COMMANDS = {
    "run": "pykubeproxy.cli.run:run",
    "render": "pykubeproxy.cli.render:render",
    "dump-rules": "pykubeproxy.cli.dump_rules:dump_rules",
    "explain": "pykubeproxy.cli.explain:explain",
    "diff": "pykubeproxy.cli.diff:diff",
    "trace": "pykubeproxy.cli.trace:trace",
    "status": "pykubeproxy.cli.status:status",
    "check": "pykubeproxy.cli.check:check",
    "cleanup": "pykubeproxy.cli.cleanup:cleanup",
    "lab": "pykubeproxy.cli.lab:lab",
    "completion": "pykubeproxy.cli.completion:completion",
}


class _LazyGroup(click.Group):
    """Import the module of a command on use, so that no command loads the libraries of others."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return [name for name in _COMMANDS if name != "lab" or not _no_lab()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        if cmd_name == "lab" and (reason := _no_lab()):
            raise click.ClickException(reason)
        _end_on_sigterm()
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command


def _end_on_sigterm() -> None:
    """End on SIGTERM while modules are imported; the kernel gives process 1 of a container no default for it."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def _no_lab() -> str:
    """Return why this installation has no lab, "" if it has; the container image omits it."""
    if find_spec("pykubeproxy.lab") is None:
        return "this installation has no lab; run it from a checkout"
    from pykubeproxy.kernel.requirements import NotANode, require_node

    try:
        require_node()
    except NotANode as error:
        return str(error)
    return ""


@click.group(
    cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(pykubeproxy.__version__, prog_name="pykubeproxy", message="%(prog)s %(version)s")
def main() -> None:
    """Run and inspect a Kubernetes service proxy for iptables, a replacement for kube-proxy.

    \b
    Try it without a cluster:    sudo pykubeproxy lab demo
    Print the rules it writes:   pykubeproxy render -f objects.yaml
    """
    terminal.guard()
