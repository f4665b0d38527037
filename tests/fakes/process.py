"""The agent as a separate process, and a network namespace for it and the test."""

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
from tests.fakes.http_client import fetch

CHECK = (sys.executable, "-c", "from pykubeproxy.cli.check import check; check()", "-o", "json")
PROGRAM = (sys.executable, "-c", "from pykubeproxy.cli import main; main()", "run")
HEALTH, METRICS = 10256, 10249


@contextmanager
def inside_a_namespace(*addresses: str) -> Iterator[str]:
    """Move the calling thread and its children to a new network namespace; yield its name.

    `lo` is up and has these IPv4 addresses besides 127.0.0.1.
    """
    name = f"ag-{uuid.uuid4().hex[:10]}"
    netns.create(name)
    netns.pushns(name)
    try:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        for address in addresses:
            subprocess.run(["ip", "addr", "replace", f"{address}/32", "dev", "lo"], check=True)
        # A new namespace inherits this setting, which a proxy may have changed.
        system.write_setting("net/ipv4/conf/all/route_localnet", 0)
        yield name
    finally:
        netns.popns()
        netns.remove(name)


@contextmanager
def running(
    log: Path, *flags: str, environment: Mapping[str, str] | None = None, program: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Run an agent, or another Python `program` with its arguments, that writes its log to a file; kill it on exit."""
    with log.open("wb") as errors:
        command = (sys.executable, "-c", program, "run") if program else PROGRAM
        process = subprocess.Popen(
            [*command, *flags],
            stderr=errors,
            env={**os.environ, **(environment or {})},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def path_without_ip6tables(folder: Path) -> str:
    """Return a PATH with all commands but ip6tables; `folder` gets links to those of the system's folders."""
    (tools := folder / "tools").mkdir()
    for command in Path("/usr/sbin").iterdir():
        if not command.name.startswith("ip6tables"):
            (tools / command.name).symlink_to(command)
    return f"{tools}:/usr/bin:/bin"


def run_check(code: int, *flags: str) -> dict[str, Any]:
    """Return the JSON of `pykubeproxy check` and assert its exit code."""
    outcome = subprocess.run([*CHECK, *flags], capture_output=True, text=True)
    assert outcome.returncode == code, outcome.stdout + outcome.stderr
    return json.loads(outcome.stdout)


def answers(port: int, path: str, status: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server on that port sends this status; False without a server."""
    try:
        return fetch(port, path, host=host).status == status
    except ConnectionError:
        return False


def saved(command: str = "iptables-nft-save") -> list[str]:
    """Return the live rules of iptables-save without comment lines."""
    output = subprocess.run([command], capture_output=True, text=True, check=True).stdout
    return [line for line in output.splitlines() if not line.startswith("#")]


@contextmanager
def dropped(port: int) -> Iterator[None]:
    """Drop all packets from and to a port."""
    rules = [["INPUT", "-p", "tcp", side, str(port), "-j", "DROP"] for side in ("--dport", "--sport")]
    for rule in rules:
        subprocess.run(["iptables", "-A", *rule], check=True)
    try:
        yield
    finally:
        for rule in rules:
            subprocess.run(["iptables", "-D", *rule], check=True)
