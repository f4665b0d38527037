"""Inspection commands in a lab, run as an operator runs them on a node or elsewhere."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pykubeproxy.lab.agents import COMMAND, node_environment
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import Namespace

SECONDS = 30.0
_PLUGIN = [sys.executable, "-c", "from pykubeproxy.cli.kubectl import main; main()"]


class Answer(NamedTuple):
    """The exit code of a command and its output, without line breaks."""

    code: int
    text: str


def run_on_node(lab: Lab, node: str, command: str) -> Answer:
    """Run `pykubeproxy COMMAND` on a node; raises TimeoutExpired after 30 seconds."""
    return _run([*COMMAND, *command.split()], lab.nodes[node].namespace, node_environment(lab.logs, node))


def run_plugin(lab: Lab, command: str) -> Answer:
    """Run `kubectl pykubeproxy COMMAND` on the client; raises TimeoutExpired after 30 seconds."""
    environment = {**node_environment(lab.logs, "client"), "KUBECONFIG": str(lab.directory.kubeconfig)}
    return _run([*_PLUGIN, *command.split()], lab.client.namespace, environment)


def _run(command: Sequence[str], where: Namespace, environment: Mapping[str, str]) -> Answer:
    with where.entered():
        done = subprocess.run(
            command,
            env={**environment, "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    return Answer(done.returncode, " ".join(done.stdout.split()))
