"""`trace --live` in a lab: a healthy path, and faults told apart on the wire."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.faults import FAULTS, Fault, break_lab, mend
from tests.fakes.kubectl import kubectl, needs_kubectl
from tests.fakes.process import COMMAND

pytestmark = [pytest.mark.root, needs_kubectl]

TRACE = ("trace", "--live", "-o", "json")
SERVICES = "/api/v1/namespaces/default/services"
ENDS = ("pod/default/client-1", "svc/default/web")


BEHIND = "left node1 for 10.244.2.2:8080, and no reply came back"
# The cause and gist over all nodes, and by the view of node1 alone: it does not know what happens behind it.
SHOWN = {
    # After some seconds, node1 itself answers that it does not reach node2.
    "link": (("never-arrived", "look at the network between node1 and node2"), None),
    "port": (("not-listening", "nothing listens at"), ("refused", "so nothing listens there, or a firewall")),
    "iptables": (("as-predicted", "node2 drops the others (filter FORWARD)"), ("no-reply", BEHIND)),
    "nftables": (("as-predicted", "node2 drops the others (inet lab-fault forward)"), ("no-reply", BEHIND)),
    "asymmetric": (("reply-lost", "which answered, but no reply came back to node1"), ("no-reply", BEHIND)),
    "mtu": (("mtu", "the MTU between node1 and node2 is smaller"), ("mtu", "the MTU on the way is smaller")),
    "stale": (("as-predicted", "sends the others to endpoints that have gone"), None),
    # The agent on node1 cannot be asked about the pod: connections to it are new, too.
    "conntrack": (("table-full", "its conntrack table is full"), None),
}


# On legacy, only the faults whose traces differ with the backend.
CASES = [
    (backend, fault)
    for backend in ("nft", "legacy")
    for fault in FAULTS
    if backend == "nft" or fault.name in ("iptables", "stale")
]


@pytest.fixture(scope="module", params=["nft", "legacy"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A lab with a client on node1 and an endpoint on each node."""
    with (
        Lab(f"tv{os.getpid()}{request.param}", backend=request.param) as made,
        made.outside.namespace.entered(),
    ):
        made.deploy("client", 1, nodes=["node1"])
        made.deploy("web", 2)
        made.service("web")
        made.until(lambda: kubectl(made, "pykubeproxy", *TRACE, *ENDS).returncode == 0, "a path")
        yield made


def live(lab: Lab, *ends: str) -> tuple[int, str, dict[str, Any]]:
    """Trace over both nodes; return exit code, message and document."""
    done = kubectl(lab, "pykubeproxy", *TRACE, *(ends or ENDS))
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found["message"], found


def in_host(lab: Lab, host: str, *command: str) -> str:
    namespace = lab.nodes[host].namespace if host in lab.nodes else lab.pods[host].namespace
    with namespace.entered():
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextmanager
def firewall(lab: Lab, host: str, hook: str, *rules: str) -> Iterator[None]:
    chain = f"chain c {{ type filter hook {hook} priority 10; {'; '.join(rules)}; }}"
    in_host(lab, host, "nft", f"table inet hostfw {{ {chain}; }}")
    yield
    in_host(lab, host, "nft", "delete table inet hostfw")


def test_healthy_path_works_and_leaves_no_entry(lab: Lab) -> None:
    code, message, found = live(lab)
    assert (code, found["verdict"]) == (0, "works")
    assert message.startswith("Rules and reality agree: 10 of 10 connections arrived, ")
    ports = {f"sport={probe['sourcePort']} " for probe in found["observed"]["probes"]}
    assert len(ports) == 10
    for node in lab.nodes:
        assert not [port for port in ports if port in in_host(lab, node, "conntrack", "-L")]


def test_command_on_the_node_probes_from_the_pod(lab: Lab) -> None:
    with lab.nodes["node1"].namespace.entered():
        done = subprocess.run(
            (*COMMAND, *TRACE, lab.pods["client-1"].addresses[0], f"{lab.pods['web-1'].addresses[0]}:8080"),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["observed"]["probes"][0]["source"] == lab.pods["client-1"].addresses[0]


@pytest.mark.parametrize("family", [4, 6])
def test_nothing_listening_names_the_pod(lab: Lab, family: int) -> None:
    address = lab.pods["web-2"].addresses[family == 6]
    end = f"[{address}]:8099" if family == 6 else f"{address}:8099"
    code, message, found = live(lab, ENDS[0], end)
    assert (code, found["causes"][0]["cause"]) == (3, "not-listening")
    assert f"reached node2, but nothing listens at {end} (pod default/web-2)" in message


def test_rules_of_another_firewall_that_drop_agree(lab: Lab) -> None:
    with firewall(lab, "node2", "forward", "tcp dport 8080 counter drop"):
        code, message, _ = live(lab, ENDS[0], "pod/default/web-2:8080")
    assert code == 1
    assert "node2 drops its packets (inet hostfw c)" in message


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_rule_that_trace_cannot_evaluate_is_named_by_its_counter(lab: Lab, node: str) -> None:
    with firewall(lab, node, "forward", "meta length 60 tcp dport 8080 counter drop"):
        code, message, found = live(lab, ENDS[0], "pod/default/web-2:8080")
    assert (code, found["causes"][0]["cause"]) == (3, "dropped")
    assert f"died on {node} in inet hostfw c: `meta length 60 tcp dport 8080 counter drop`" in message


@contextmanager
def lost(lab: Lab, node: str, packets: str) -> Iterator[None]:
    """Lose packets where they arrive, before any rule of iptables and conntrack."""
    hook = "type filter hook ingress device eth0 priority 0"
    in_host(lab, node, "nft", f"table netdev lost {{ chain c {{ {hook}; {packets} drop; }}; }}")
    yield
    in_host(lab, node, "nft", "delete table netdev lost")


def test_packets_that_the_network_loses_never_arrive(lab: Lab) -> None:
    with lost(lab, "node2", "tcp dport 8080"):
        code, message, found = live(lab, ENDS[0], "pod/default/web-2:8080")
    assert (code, found["causes"][0]["cause"]) == (3, "never-arrived")
    assert "node2 never saw the packets: look at the network between node1 and node2" in message


def test_replies_that_do_not_come_back_are_told_apart(lab: Lab) -> None:
    with lost(lab, "node1", "tcp sport 8080"):
        code, message, found = live(lab, ENDS[0], "pod/default/web-2:8080")
    assert (code, found["causes"][0]["cause"]) == (3, "reply-lost")
    assert "which answered, but no reply came back to node1" in message


def test_replies_from_another_address_are_unmatched(lab: Lab) -> None:
    endpoint = lab.pods["web-2"].addresses[0]
    rules = (
        f"chain c {{ type filter hook forward priority 0; ip saddr {endpoint} ip saddr set 10.244.2.99; }}"
    )
    fabric = lab.network.fabric.name
    subprocess.run(("ip", "netns", "exec", fabric, "nft", f"table bridge odd {{ {rules}; }}"), check=True)
    try:
        code, message, found = live(lab, ENDS[0], "pod/default/web-2:8080")
    finally:
        subprocess.run(("ip", "netns", "exec", fabric, "nft", "delete table bridge odd"), check=True)
    assert (code, found["causes"][0]["cause"]) == (3, "reply-unmatched")
    assert "come back to node1 unmatched" in message


def test_rejection_without_endpoints_agrees(lab: Lab) -> None:
    lab.service("empty")
    lab.until(lambda: live(lab, ENDS[0], "svc/default/empty")[0] == 1, "rules that reject")
    code, message, _ = live(lab, ENDS[0], "svc/default/empty")
    assert code == 1
    assert "node1 rejects its packets" in message


def test_probes_stay_in_the_cluster(lab: Lab) -> None:
    done = kubectl(lab, "pykubeproxy", *TRACE, ENDS[0], "203.0.113.10:80")
    assert done.returncode == 2
    assert "no Service, pod or node" in done.stderr


@pytest.mark.parametrize(
    ("lab", "fault"), CASES, ids=[f"{case[0]}-{case[1].name}" for case in CASES], indirect=["lab"]
)
def test_each_fault_of_the_lab_has_its_own_sentence(lab: Lab, fault: Fault) -> None:
    more = ("--count", "20", "--size", "2000")
    (cause, gist), alone = SHOWN[fault.name]

    def causes(found: dict[str, Any]) -> set[str]:
        return {one["cause"] for one in found["causes"]} - {"arrived"}

    answers: list[tuple[int, str, dict[str, Any]]] = []

    def shows_the_cause() -> bool:
        answers.append(live(lab, *ENDS, *more))
        return causes(answers[-1][2]) == {cause}

    lab.until(lambda: live(lab, *ENDS, *more)[0] == 0, "a path")
    break_lab(lab, fault)
    try:
        lab.until(shows_the_cause, cause)
        code, message, found = answers[-1]
        assert (code, found["verdict"]) == (
            (1, "fails-as-predicted") if cause == "as-predicted" else (3, "differs")
        )
        assert gist in message
        # Chance may send nearly all probes to one endpoint, once in some thousand traces.
        text = (*TRACE[:2], *ENDS, *more)
        lab.until(lambda: gist in " ".join(kubectl(lab, "pykubeproxy", *text).stdout.split()), gist)
        if alone:
            service = next(one for one in lab.api.items(SERVICES) if one["metadata"]["name"] == "web")
            ends = (lab.pods["client-1"].addresses[0], f"{service['spec']['clusterIP']}:80")
            with lab.nodes["node1"].namespace.entered():
                done = subprocess.run((*COMMAND, *TRACE, *ends, *more), capture_output=True, text=True)
            found = json.loads(done.stdout)
            assert done.returncode == 3
            assert alone[0] in causes(found)
            assert alone[1] in found["message"]
    finally:
        mend(lab)


def test_dry_run_prints_the_debug_pods_and_sends_nothing(lab: Lab) -> None:
    def syns() -> str:
        client = lab.pods["client-1"].namespace
        with client.entered():
            return Path("/proc/net/snmp").read_text().split("Tcp:")[2].split()[4]  # ActiveOpens

    before = syns()
    done = kubectl(lab, "pykubeproxy", *TRACE[:2], *ENDS, "--dry-run", "--debug-image", "image:1")
    assert done.returncode == 0, done.stderr
    reading, entering = (pod["spec"] for pod in yaml.safe_load_all(done.stdout))
    assert "hostPID" not in reading
    assert entering["hostPID"]
    assert {pod["nodeName"] for pod in (reading, entering)} == {"node1"}
    assert "debug" not in kubectl(lab, "get", "pods", "-A").stdout
    assert syns() == before


def test_probes_from_outside_are_sent_by_the_machine_with_that_address(lab: Lab) -> None:
    lab.service("shop", type="NodePort", selector={"app": "web"})
    ends = (lab.outside.addresses[0], "svc/default/shop", "--via-node", "node1")
    lab.until(lambda: live(lab, *ends)[0] == 0, "a path from outside")
    lab.until(lambda: live(lab, lab.outside.addresses[1], *ends[1:])[0] == 0, "a path from outside over IPv6")
    with firewall(lab, "node2", "forward", "tcp dport 8080 counter drop"):
        code, message, found = live(lab, *ends, "--count", "20")
    assert (code, found["verdict"]) == (1, "fails-as-predicted")
    assert "node2 drops the others (inet hostfw c)" in message
    refused = kubectl(lab, "pykubeproxy", *TRACE, "203.0.113.250", *ends[1:])
    assert "no address of a pod, a node or this machine" in refused.stderr
