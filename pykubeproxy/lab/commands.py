"""Inspection commands in a lab, run as an operator runs them on a node."""

import subprocess
from typing import NamedTuple

from pykubeproxy.lab.agents import COMMAND, node_environment
from pykubeproxy.lab.cluster import Lab

SECONDS = 30.0


class Answer(NamedTuple):
    """The exit code of a command and its output, without line breaks."""

    code: int
    text: str


def run_on_node(lab: Lab, node: str, command: str) -> Answer:
    """Run `pykubeproxy COMMAND` on a node; raises TimeoutExpired after 30 seconds."""
    with lab.nodes[node].namespace.entered():
        done = subprocess.run(
            [*COMMAND, *command.split()],
            env={**node_environment(lab.logs, node), "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    return Answer(done.returncode, " ".join(done.stdout.split()))
