"""The agent as a process of its own, and a network namespace for it and the test."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyroute2 import netns

from pykubeproxy.kernel import system
from tests.fakes.asking import ask

CHECK = (sys.executable, "-c", "from pykubeproxy.cli.check import check; check()", "-o", "json")
PROGRAM = (sys.executable, "-c", "from pykubeproxy.cli import main; main()", "run")
HEALTH, METRICS = 10256, 10249


@contextmanager
def inside_a_namespace() -> Iterator[str]:
    """The calling thread, and what it starts, is in a fresh network namespace of this name, with `lo` up."""
    name = f"ag-{uuid.uuid4().hex[:10]}"
    netns.create(name)
    netns.pushns(name)
    try:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        # A new namespace takes this over from the first one, where a proxy may have turned it on.
        system.write_setting("net/ipv4/conf/all/route_localnet", 0)
        yield name
    finally:
        netns.popns()
        netns.remove(name)


@contextmanager
def running(
    log: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A running agent that writes its log there; on exit it is gone."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*PROGRAM, *flags], stderr=errors, env={**os.environ, **(environment or {})}
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def checked(code: int, *flags: str) -> dict[str, Any]:
    """The document of `pykubeproxy check`, which ends with this exit code."""
    outcome = subprocess.run([*CHECK, *flags], capture_output=True, text=True)
    assert outcome.returncode == code, outcome.stdout + outcome.stderr
    return json.loads(outcome.stdout)


def answers(port: int, path: str, status: int) -> bool:
    """Whether somebody listens on that port and answers so; a port may be closed in the middle of an answer."""
    try:
        return ask(port, path).status == status
    except ConnectionError:
        return False


def saved(command: str = "iptables-nft-save") -> list[str]:
    """The live rules, without counters and comments of the tool."""
    output = subprocess.run([command], capture_output=True, text=True, check=True).stdout
    return [line for line in output.splitlines() if not line.startswith("#")]
