"""The agent as a process, also confined like a container, and a network namespace for agent and test."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pyroute2 import netns

from pykubeproxy.agent.observe.handlers import metrics_pages
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.agent.observe.status import list_objects
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.config import load
from pykubeproxy.kernel import system
from pykubeproxy.objects import Family, Kind, Listed, Node
from pykubeproxy.pages.servicez import NodeObjects, Quarantined
from pykubeproxy.pages.statusz import AgentStatus, PageFilter, decode
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from tests.fakes.http_client import fetch
from tests.fakes.waiting import PATIENCE
from tests.objects import endpoint, service, slice_of
from tests.unit.agent.conftest import Serve

MAIN = "from pykubeproxy.cli import main; main()"
COMMAND = (sys.executable, "-c", MAIN)
PROGRAM = (*COMMAND, "run")
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
    log: Path | int,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    before: str = "",
    inside: Sequence[str] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run an agent that writes its log to a file or descriptor; kill it on exit.

    `before` is Python code that the process runs first, in order to change the program. `inside` is a command that runs
    another one.
    """
    command = (sys.executable, "-c", f"{before}\n{MAIN}", "run") if before else PROGRAM
    with nullcontext(log) if isinstance(log, int) else log.open("wb") as errors:
        process = subprocess.Popen(
            [*inside, *command, *flags], stderr=errors, env={**os.environ, **(environment or {})}
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie: a child of a killed command is one until init reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pykubeproxy(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output; `options` are those of subprocess.run."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=PATIENCE, **options)


def tool(folder: Path, name: str, script: str) -> dict[str, str]:
    """Replace a command of iptables by a shell script, in which $real is the command itself.

    Return the environment in which the script is found.
    """
    real = shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    (folder / "tools").mkdir(exist_ok=True)
    (folder / "tools" / name).write_text(f"#!/bin/sh\nreal={real}\n{script}\n")
    (folder / "tools" / name).chmod(0o755)
    return {"PATH": f"{folder}/tools:{os.environ['PATH']}"}


def megabytes(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def status() -> AgentStatus:
    """Return the status page of an agent in this namespace."""
    return decode(fetch(METRICS, "/statusz", accept="application/json").body.encode())


def metric(beginning: str) -> float:
    """Return the sum of the metrics whose names and labels begin so."""
    lines = fetch(METRICS, "/metrics").body.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(beginning))


def path_without_ip6tables(folder: Path) -> str:
    """Return a PATH with all commands but ip6tables; `folder` gets links to those of the system's folders."""
    (tools := folder / "tools").mkdir()
    for command in Path("/usr/sbin").iterdir():
        if not command.name.startswith("ip6tables"):
            (tools / command.name).symlink_to(command)
    return f"{tools}:/usr/bin:/bin"


def run_check(code: int, *flags: str) -> dict[str, Any]:
    """Return the node in the JSON of `pykubeproxy check`, and assert its exit code."""
    outcome = pykubeproxy("check", "-o", "json", *flags)
    assert outcome.returncode == code, outcome.stdout + outcome.stderr
    (found,) = json.loads(outcome.stdout)["nodes"]
    return dict(found)


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


# Make all mounts read-only in a new mount namespace, including /proc/sys, as a container runtime does. Only the locks of
# the legacy tables and of agents stay writable, as in the DaemonSet.
_CONFINE = r"""
set -eu
lock=$1; capabilities=$2; shift 2
mount --bind "$lock" "$lock"
mkdir -p /run/pykubeproxy
mount --bind /run/pykubeproxy /run/pykubeproxy
mount --bind /proc/sys /proc/sys
cut -d' ' -f5 /proc/self/mountinfo | while read -r place; do
    case $place in
    "$lock" | /run/pykubeproxy | /dev | /dev/* | /proc) ;;
    *) mount -o remount,bind,ro "$place" 2>/dev/null || echo "$place cannot be made read-only" >&2 ;;
    esac
done
if touch /read-only-root 2>/dev/null; then echo "the root can be written" >&2; exit 1; fi
exec setpriv --bounding-set="-all$capabilities" --inh-caps=-all --ambient-caps=-all --no-new-privs -- "$@"
"""


def confined(
    log: Path, lock: Path, capabilities: tuple[str, ...], *flags: str
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run an agent with only these capabilities, such as net_admin; write its log to a file."""
    lock.touch()
    bounding = "".join(f",+{it}" for it in capabilities)
    entering = ("unshare", "--mount", "--propagation", "private", "sh", "-c", _CONFINE, "sh")
    environment = {"XTABLES_LOCKFILE": str(lock)}
    return running(log, *flags, environment=environment, inside=(*entering, str(lock), bounding))


def capabilities_of(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Return all capabilities a process has or may get, as bits, and whether no_new_privs is set."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    bits = 0
    for name in ("CapPrm", "CapEff", "CapInh", "CapAmb", "CapBnd"):
        bits |= int(fields[name], 16)
    return bits, fields["NoNewPrivs"] == "1"


REFUSED = PortName("ns", "api", "http", "TCP")
REFUSING = cast(
    "FamilyTables",
    SimpleNamespace(quarantined=lambda: (Quarantined.from_port(Family.IPV4, REFUSED, "No such file", 1.0),)),
)
API_SERVERS = frozenset({("203.0.113.7", 80)})


def cluster() -> Cluster:
    made = Cluster()
    made.apply(
        Listed(
            Kind.SERVICE,
            (service("web", external_ips=("203.0.113.7",)), service("api", cluster_ip="10.96.0.9")),
        )
    )
    endpoints = (
        endpoint("10.42.1.1", node_name="node1", zone="a", zone_hints=("a",), pod="web-1"),
        endpoint("10.42.2.2", node_name="node2", zone="b", zone_hints=("b",)),
    )
    made.apply(Listed(Kind.ENDPOINT_SLICE, (slice_of(*endpoints, service="web"),)))
    made.apply(Listed(Kind.NODE, (Node("node1", ("192.168.99.10",), zone="a"),)))
    return made


def agent(serve: Serve, busy: int = 0, **flags: str) -> str:
    """Serve the pages of an agent that does not answer the first `busy` times; return its address."""
    settings = {"cluster-cidr": "10.42.0.0/16", **{name.replace("_", "-"): it for name, it in flags.items()}}
    syncs = [None] * busy

    def objects(wanted: PageFilter, all_slices: bool) -> NodeObjects | None:
        if syncs:
            return syncs.pop()
        return list_objects(cluster(), [REFUSING], "node1", wanted, API_SERVERS, all_slices)

    page = metrics_pages(Metrics(lambda _: None).page, load(None, settings).config, {}, None, objects)
    return f"http://127.0.0.1:{serve(page)}"
