"""Which conntrack entries the agent deletes after a change, beside those that kube-proxy 1.36 deletes.

tests/data/flows.yaml is recorded from both, on nodes with the same entries; `differences` are rows of docs/differences.md.
Changed by `after`, step by step, each Service has one EndpointSlice.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from pykubeproxy.agent.flow_cleaner import FlowCleaner
from pykubeproxy.kernel import Runner
from pykubeproxy.objects import (
    Deleted,
    EndpointPort,
    Event,
    Family,
    Key,
    Kind,
    Port,
    Protocol,
    Updated,
    family_of,
)
from pykubeproxy.services.flows import NodePortAddresses
from tests.fakes.synced import SyncedFamily, flags_context
from tests.kernel.flows import CLIENT, insert, listed
from tests.objects import endpoint, service, slice_of

ROOT = Path(__file__).parents[2]
DATA = yaml.safe_load((ROOT / "tests/data/flows.yaml").read_text())
FLOW = re.compile(r"(\w+) (\S+):(\d+) (\S+):(\d+)(?: zone (\d+))?")
WHO = re.compile(r"both|neither|(?:pykubeproxy(?:, kube-proxy at times)?|kube-proxy(?: at times)?) \((.+)\)")
NODE = """
ip link set lo up
ip link add eth0 type veth peer eth1
ip link set eth0 up
ip link set eth1 up
ip address add 192.168.0.1/24 dev eth0
ip address add 10.9.0.1/24 dev eth0
ip address add fd00::1/64 dev eth0 nodad
ip route add default via 192.168.0.254
ip route add default via fd00::fe
"""


class Node:
    """Syncs over pretended tables, with a cleaner of the real conntrack table."""

    def __init__(self, case: dict[str, Any], family: Family) -> None:
        self._addresses = NodePortAddresses(tuple(case.get("nodePortAddresses", ())))
        self._synced = SyncedFamily(context=flags_context(family))
        self._objects: dict[str, dict[str, Any]] = {}
        self.start()

    def start(self) -> None:
        """Replace the agent by a new one."""
        self._synced.restart()
        self._cleaner = FlowCleaner(0)

    def change(self, step: dict[str, dict[str, Any]]) -> None:
        """Apply the changed fields of each Service and its EndpointSlice."""
        for name, fields in step.items():
            self._objects[name] = self._objects.get(name, {}) | fields
            self._synced.apply(*_events(name, self._objects[name]))

    def sync(self) -> None:
        self._cleaner.notice(msgspec.structs.replace(self._synced.sync(), node_ports=self._addresses))
        self._cleaner.clean()


def _events(name: str, fields: dict[str, Any]) -> list[Event]:
    cluster_ip, type_ = fields.get("clusterIP", "10.96.0.53"), fields.get("type", "ClusterIP")
    number = 0 if type_ == "ClusterIP" else fields.get("nodePort", 30053)
    made = service(
        name,
        cluster_ip=cluster_ip,
        type=type_,
        ports=(Port("dns", Protocol.UDP, fields.get("port", 53), number),),
        external_ips=tuple(fields.get("externalIPs", ())),
        load_balancer_ips=tuple(fields.get("loadBalancerIPs", ())),
        external_local=fields.get("local", False),
    )
    endpoints = [
        {"address": given} if isinstance(given, str) else given for given in fields["endpoints"] or ()
    ]
    ends = (
        endpoint(
            **{"node_name": given.get("node", "node1"), **{key: given[key] for key in given if key != "node"}}
        )
        for given in endpoints
    )
    port = EndpointPort("dns", Protocol.UDP, fields.get("targetPort", 5353))
    slice_ = slice_of(*ends, service=name, name=name, ports=(port,))
    has_slice, served = fields["endpoints"] is not None, fields.get("served", True)
    if endpoints:
        assert slice_.family is family_of(cluster_ip)
    return [
        Updated(slice_) if has_slice else Deleted(Kind.ENDPOINT_SLICE, Key("ns", name)),
        Updated(made) if served else Deleted(Kind.SERVICE, Key("ns", name)),
    ]


@pytest.mark.root
@pytest.mark.parametrize("case", [pytest.param(case, id=case["case"]) for case in DATA["cases"]])
def test_deletes_these_flows(case: dict[str, Any], inside: str, runner: Runner) -> None:
    """All others stay."""
    for command in NODE.strip().splitlines():
        assert runner.run(command.split()).exit_code == 0, command
    flows: list[tuple[Any, str]] = [(FLOW.fullmatch(text), who) for text, who in case["flows"].items()]
    family = family_of(flows[0][0][2])
    node = Node(case, family)
    node.change(case["before"])
    node.sync()
    for number, (flow, _) in enumerate(flows):
        protocol, address, port, replier, reply_port, zone = flow.groups("0")
        client = f"{CLIENT[family]} {4000 + number}"
        insert(runner, client, f"{address} {port}", f"{replier} {reply_port}", protocol, int(zone))
    if case.get("restarted"):
        node.start()
    for step in case["after"] or [{}]:
        node.change(step)
        node.sync()
    left = "".join(listed(runner, family))
    deleted = {flow[0] for number, (flow, _) in enumerate(flows) if f"sport={4000 + number} " not in left}
    assert deleted == {flow[0] for flow, who in flows if who.startswith(("both", "pykubeproxy"))}


def test_differences_are_documented() -> None:
    """Each flow that only one program deletes belongs to a row of the page."""
    page = (ROOT / "docs/differences.md").read_text()
    assert [difference for difference in DATA["differences"].values() if difference not in page] == []
    marks = [WHO.fullmatch(who) for case in DATA["cases"] for who in case["flows"].values()]
    named = {mark[1] for mark in marks if mark and mark[1]}
    assert named == set(DATA["differences"])
