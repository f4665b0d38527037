"""A page's examples run one after the other, as a reader types them, in a folder and a lab of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

from pykubeproxy.lab.machine import RunDirectory
from pykubeproxy.lab.network import namespace_prefix
from tests.fakes.waiting import PATIENCE

_ANY = "\N{HORIZONTAL ELLIPSIS}"


class Session:
    """A shell in a folder; `lab` is the name that `pykubeproxy lab` takes in place of its own default."""

    def __init__(self, folder: Path, lab: str) -> None:
        self._folder = folder
        self._lab = lab
        kubeconfig = RunDirectory(lab).kubeconfig
        self._at_api_server = f"ip netns exec {namespace_prefix(lab)}outside env KUBECONFIG={kubeconfig}"
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "80",
            "NO_COLOR": "1",
        }

    def run(self, command: str) -> tuple[int, str]:
        """The exit status of a command and what it printed."""
        done = subprocess.run(
            ["bash", "-c", f'sudo() {{ "$@"; }}\n{self._as_typed(command)}'],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE,
            check=False,
        )
        return done.returncode, done.stdout.decode()

    def _as_typed(self, command: str) -> str:
        """The command, in the lab of this session; kubectl and its plugin at its API server, curl in the pod client."""
        named = rf"\g<0> --name {self._lab}"
        command = command.replace(".venv/bin/", "")
        command = re.sub(r"^curl ", "pykubeproxy lab exec client -- curl ", command)
        command = re.sub(r"(?<!-- )\bkubectl ", f"{self._at_api_server} kubectl ", command)
        command = command.replace("kubectl pykubeproxy ", "kubectl-pykubeproxy ")
        return re.sub(
            r"pykubeproxy lab (up|down|exec|status|demo|start|stop|scale|break|mend)\b(?! --(name|list))",
            named,
            command,
        )


def agrees(expected: tuple[str, ...], output: str) -> bool:
    """Whether an output is as the page has it.

    Numbers, the width of gaps, and how many packets an endpoint has got may differ, as they differ from one machine and
    moment to the next. An ellipsis stands for any text; on a line of its own, for any lines.
    """
    lines = _plain("\n".join(expected)).split("\n")
    pattern = "\n".join(".*" if line == _ANY else _line(line) for line in lines)
    return re.fullmatch(pattern, _plain(output), re.DOTALL) is not None


def _line(line: str) -> str:
    return re.escape(line).replace(_ANY, r"[^\n]*")


def _plain(text: str) -> str:
    text = re.sub(r"\d+(\.\d+)?", "0", re.sub(r" +\d+ packets?$", "", text, flags=re.MULTILINE))
    return re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*", "\n", text)).strip()
