"""Faults of a running lab: each fails connections to the Service `web` in its own way, until `mend` removes it.

They strike between the nodes or on node2, so that the pod `client`, which is on node1, meets them at pods of node2. Only
a full conntrack table strikes on node1.
"""

import os
import subprocess
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pykubeproxy.lab import full_table
from pykubeproxy.lab.api import POD_PORT
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import FABRIC, SITES

APP = "web"
CLOSED_PORT = 9090
#: Bytes of the largest packet between the nodes with the fault `mtu`. Connections begin with smaller ones.
NARROW = 1000
_NODE1, _NODE2 = SITES.values()
# The fabric is a switch: what it bridges meets no rules of iptables and of nftables for IP.
_SWITCH = (
    "for file in /proc/sys/net/bridge/bridge-nf-call-ip*tables; do test ! -e $file || echo 0 >$file; done"
)
_TABLE = "inet lab-fault"


class Fault(NamedTuple):
    """What `lab break` does.

    - `title`: what fails
    - `make`, `undo`: a host, and lines for its shell; those of `undo` also work without the fault
    - `act`: does what shells cannot
    """

    name: str
    title: str
    make: tuple[tuple[str, str], ...] = ()
    undo: tuple[tuple[str, str], ...] = ()
    act: Callable[[Lab], None] = lambda _: None


def _isolated(state: str) -> str:
    """Return a line for the fabric, by which the ports of the nodes are isolated from each other, or not."""
    return "; ".join(f"bridge link set dev {name} isolated {state}" for name in SITES)


def _routes_to_node1(gateways: Iterable[str]) -> str:
    """Return a line for node2, by which packets to pods of node1 go through these gateways."""
    return "; ".join(
        f"ip route replace {cidr} via {gateway}"
        for cidr, gateway in zip(_NODE1.pod_cidrs, gateways, strict=True)
    )


def _table(chain: str, rule: str, table: str = _TABLE) -> str:
    """Return a line that makes a table of nftables with a chain of one rule."""
    return f"nft 'table {table} {{ chain forward {{ {chain}; {rule}; }}; }}'"


def _no_table(table: str = _TABLE) -> str:
    return f"nft 'add table {table}; delete table {table}'"


def _iptables(line: str) -> str:
    return "; ".join(line.format(f"{command}$BACKEND") for command in ("iptables", "ip6tables"))


def _point_at(lab: Lab, port: int) -> None:
    lab.change_service(APP, ports=[{"port": 80, "protocol": "TCP", "targetPort": port}])


def _replace_pod(lab: Lab) -> None:
    """Stop the service proxy of node1, and replace a pod of node2."""
    if lab.agents[_NODE1.name].alive:
        lab.agents[_NODE1.name].stop()
    for pod in [pod for pod in lab.pods.values() if pod.app == APP and pod.site == _NODE2][:1]:
        lab.stop_pod(pod)
        lab.deploy(APP, 1, nodes=[_NODE2.name])


def _fill_table(lab: Lab) -> None:
    with lab.nodes[_NODE1.name].namespace.entered():
        full_table.fill()


_FILTER = "type filter hook forward priority 10"
FAULTS = (
    Fault(
        "link",
        "the nodes do not reach each other",
        (("fabric", _isolated("on")),),
        (("fabric", _isolated("off")),),
    ),
    Fault(
        "port",
        f"web has target port {CLOSED_PORT}, where no pod listens",
        act=lambda lab: _point_at(lab, CLOSED_PORT),
    ),
    Fault(
        "iptables",
        "a rule of iptables on node2 drops packets to its pods",
        (("node2", _iptables(f"{{}} -I FORWARD -p tcp --dport {POD_PORT} -j DROP")),),
        (
            (
                "node2",
                _iptables(
                    f"while {{}} -D FORWARD -p tcp --dport {POD_PORT} -j DROP 2>/dev/null; do true; done"
                ),
            ),
        ),
    ),
    Fault(
        "nftables",
        "a rule of nftables on node2 drops packets to its pods",
        (("node2", _table(_FILTER, f"tcp dport {POD_PORT} drop")),),
        (("node2", _no_table()),),
    ),
    Fault(
        "asymmetric",
        "replies of node2 pass a firewall that has not seen the requests",
        (
            ("fabric", _SWITCH),
            ("fabric", _table("type filter hook forward priority 0", "ct state invalid drop")),
            ("node2", _routes_to_node1(FABRIC)),
        ),
        (("node2", _routes_to_node1(_NODE1.addresses)), ("fabric", _no_table())),
    ),
    Fault(
        "mtu",
        f"packets of more than {NARROW} bytes get lost between the nodes",
        (
            (
                "fabric",
                _table(
                    "type filter hook forward priority 0", f"meta length > {NARROW} drop", "bridge lab-fault"
                ),
            ),
        ),
        (("fabric", _no_table("bridge lab-fault")),),
    ),
    Fault(
        "stale",
        "the proxy of node1 has stopped, and a pod of node2 was replaced",
        act=_replace_pod,
    ),
    Fault(
        "conntrack",
        "the conntrack table of node1 is full, so it drops new connections",
        act=_fill_table,
    ),
)


def break_lab(lab: Lab, fault: Fault) -> None:
    """Make a fault. Raises RuntimeError if a command fails."""
    _run(lab, fault.make)
    fault.act(lab)


def mend(lab: Lab) -> None:
    """Remove all faults, and start the service proxies that have stopped. Raises RuntimeError if a command fails."""
    for fault in FAULTS:
        _run(lab, fault.undo)
    with lab.nodes[_NODE1.name].namespace.entered():
        full_table.empty()
    _point_at(lab, POD_PORT)
    for agent in lab.agents.values():
        if not agent.alive:
            agent.start()


def _run(lab: Lab, commands: Iterable[tuple[str, str]]) -> None:
    # A trace follows the rules of one backend: that of the proxies.
    environment = {**os.environ, "BACKEND": "" if lab.backend == "auto" else f"-{lab.backend}"}
    hosts = {"fabric": lab.network.fabric, **lab.network.nodes}
    for host, line in commands:
        with hosts[host].entered():
            done = subprocess.run(
                ["sh", "-ec", line],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"{line} on {host}: {done.stderr.strip()}")
