"""`pykubeproxy check` on real nodes: network namespaces in all kinds of states."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pykubeproxy.cli import check as command
from pykubeproxy.kernel import Backend, Iptables, Runner, legacy, open_iptables, processes
from pykubeproxy.kernel.runner import Outcome
from pykubeproxy.kernel.system import run_in_new_namespace
from pykubeproxy.objects import Family
from tests.cases import expected, load_case

pytestmark = pytest.mark.root

OTHER = {Backend.NFT: Backend.LEGACY, Backend.LEGACY: Backend.NFT}
COMMAND = "from pykubeproxy.cli.check import check; check()"
CHECKS = {
    "privileges",
    "iptables",
    "kernel",
    "tables",
    "other-tables",
    "leftovers",
    "proxies",
    "ports",
    "node-ports",
    "forwarding",
    "rp-filter",
    "br-netfilter",
    "conntrack",
    "api-server",
    "node",
    "permissions",
}


@pytest.fixture
def node(inside: str, runner: Runner) -> Runner:
    """A node that forwards, as it should."""
    run(runner, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    return runner


def run(runner: Runner, *words: str) -> None:
    outcome = runner.run(words)
    assert outcome.exit_code == 0, outcome.stderr


def checked(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(command.check, ["-o", "json", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    document = json.loads(result.stdout)
    assert document["passed"] is (code == 0)
    return document


def of(document: dict[str, Any], name: str, family: str | None = None) -> list[dict[str, str]]:
    found = [it for it in document["checks"] if it["check"] == name and family in (None, it["family"])]
    assert found
    return found


def levels(document: dict[str, Any], name: str) -> list[str]:
    return [it["level"] for it in of(document, name)]


def state(runner: Runner) -> list[object]:
    """All that a look at the node might change."""
    legacy_tables = [legacy.legacy_tables(family) for family in Family]
    saved = [
        open_iptables(backend, family, runner).save_counted() for backend in Backend for family in Family
    ]
    return [legacy_tables, saved, runner.run(("nft", "list", "ruleset")).stdout]


def proxy_rules(runner: Runner, backend: Backend) -> Iptables:
    """Write kube-proxy's rules of one case, as another proxy would have left them."""
    iptables = open_iptables(backend, Family.IPV4, runner)
    ruleset = expected(load_case("kube-dns"), Family.IPV4)
    lines = []
    for table in ruleset.tables():
        chains = list(ruleset.of_table(table))
        lines += [f"*{table}", *(f":{name} - [0:0]" for name, _ in chains if name.startswith("KUBE-"))]
        lines += [
            f"-A {name} {rule}" for name, rules in chains for rule in rules if "--nfacct-name" not in rule
        ]
        lines.append("COMMIT")
    iptables.restore("".join(f"{line}\n" for line in lines))
    return iptables


def test_node_passes(node: Runner, backend: Backend) -> None:
    """On a fresh node nothing fails, every check is made, and the node is as it was."""
    before = state(node)
    document = checked("--iptables-backend", backend.value)
    assert state(node) == before
    assert {it["check"] for it in document["checks"]} == CHECKS
    assert document["backend"] == backend.value
    assert {it["level"] for it in document["checks"]} == {"ok", "skip"}
    assert "was tried and works" in of(document, "kernel", "IPv6")[0]["message"]


def test_a_proxys_rules(node: Runner, backend: Backend) -> None:
    """Rules in the backend in use are as they should be, and stay as they are."""
    proxy_rules(node, backend)
    before = state(node)
    document = checked()
    assert document["backend"] == backend.value
    assert f"{backend.value} is used, with " in of(document, "tables", "IPv4")[0]["message"]
    assert set(levels(document, "other-tables")) == {"ok"}
    assert state(node) == before


def test_rules_left_in_the_other_backend(node: Runner, backend: Backend) -> None:
    """A proxy's rules in the backend that is not in use fail; they are only looked at."""
    proxy_rules(node, OTHER[backend])
    before = state(node)
    document = checked("--iptables-backend", backend.value, code=1)
    assert levels(document, "other-tables") == ["fail", "ok"]
    assert "pykubeproxy cleanup" in of(document, "other-tables")[0]["advice"]
    assert state(node) == before


def test_others_in_the_other_backend(node: Runner, backend: Backend) -> None:
    """Rules there of somebody else's are a warning that names them, even if only built-in chains have any."""
    iptables = open_iptables(OTHER[backend], Family.IPV4, node)
    iptables.restore("*filter\n-A FORWARD -p udp -j DROP\nCOMMIT\n")
    document = checked("--iptables-backend", backend.value)
    assert levels(document, "other-tables") == ["warn", "ok"]
    assert "(FORWARD)" in of(document, "other-tables")[0]["message"]


def test_the_second_reader(inside: str, runner: Runner) -> None:
    """python-iptables sees the chains and numbers of rules that iptables-legacy-save prints, and no table is made."""
    assert legacy.legacy_chains(Family.IPV4) == {}
    live = proxy_rules(runner, Backend.LEGACY).save()
    tables = legacy.legacy_tables(Family.IPV4)
    found = legacy.legacy_chains(Family.IPV4)
    assert found == {key: len(rules) for key, rules in live.chains.items()}
    assert sum(found.values()) > 10
    assert legacy.legacy_tables(Family.IPV4) == tables
    assert legacy.legacy_tables(Family.IPV6) == ()


def test_the_second_reader_loads_nothing(inside: str, runner: Runner) -> None:
    """It starts modprobe without the right to load a module."""
    snippet = (
        "import sys, ctypes; sys.argv[1:] = ['IPv4'];"
        "import runpy; runpy.run_module('pykubeproxy.kernel.legacy', run_name='__main__');"
        "print(ctypes.CDLL(None).prctl(23, 16, 0, 0, 0))"
    )
    outcome = runner.run((sys.executable, "-c", snippet))
    assert outcome.stdout == "{}0\n", outcome.stderr


def test_no_forwarding(inside: str, runner: Runner) -> None:
    """A node that does not forward fails, by family: IPv6 only where it is in use."""
    document = checked(code=1)
    assert levels(document, "forwarding") == ["fail", "ok"]
    document = checked("--cluster-cidr", "10.244.0.0/16,fd00:10:244::/56", code=1)
    assert levels(document, "forwarding") == ["fail", "fail"]
    assert of(document, "forwarding", "IPv6")[0]["advice"] == "Set net.ipv6.conf.all.forwarding = 1."


def test_other_modes_of_kube_proxy(node: Runner) -> None:
    """What a kube-proxy in nftables mode left is a warning, what one in ipvs mode left fails."""
    ipvs = "*nat\n:KUBE-LOAD-BALANCER - [0:0]\nCOMMIT\n"
    open_iptables(Backend.LEGACY, Family.IPV6, node).restore(ipvs)
    document = checked("--iptables-backend", "legacy")
    assert levels(document, "leftovers") == ["warn"]
    assert "(KUBE-LOAD-BALANCER)" in of(document, "leftovers")[0]["message"]
    run(node, "nft", "add", "table", "ip6", "kube-proxy")
    document = checked()
    assert levels(document, "leftovers") == ["warn"]
    assert "ip6 kube-proxy" in of(document, "leftovers")[0]["message"]
    run(node, "ip", "link", "add", "kube-ipvs0", "type", "bridge")
    assert levels(checked(code=1), "leftovers") == ["fail"]


def test_a_bridge(node: Runner) -> None:
    """Whether iptables sees what passes within a bridge is judged by the kernel's setting, once there is a bridge."""
    run(node, "ip", "link", "add", "cni0", "type", "bridge")
    seen = node.read("/proc/sys/net/bridge/bridge-nf-call-iptables") == "1\n"
    assert levels(checked(), "br-netfilter") == ["ok" if seen else "warn"]
    mode = ("--detect-local-mode", "BridgeInterface", "--pod-bridge-interface", "cni0")
    assert levels(checked(*mode, code=0 if seen else 1), "br-netfilter") == ["ok" if seen else "fail"]


def test_sources_filtered_strictly(node: Runner) -> None:
    """Strict filtering is a warning once a node has two ways to it; single addresses, as pods have, are none."""
    for name, network in (("a", "10.1.0.1/24"), ("b", "10.2.0.1/24"), ("pod", "10.3.0.1/32")):
        run(node, "ip", "link", "add", f"up-{name}", "type", "veth", "peer", "name", f"x-{name}")
        run(node, "ip", "address", "add", network, "dev", f"up-{name}")
    run(node, "sysctl", "-qw", "net.ipv4.conf.up-a.rp_filter=1", "net.ipv4.conf.up-pod.rp_filter=1")
    document = checked()
    assert levels(document, "rp-filter") == ["warn"]
    assert of(document, "rp-filter")[0]["message"] == "sources are filtered strictly on up-a"
    run(node, "sysctl", "-qw", "net.ipv4.conf.all.rp_filter=2")
    assert levels(checked(), "rp-filter") == ["ok"]


def test_node_ports(node: Runner) -> None:
    """Local ports among the node ports are a warning, unless they are reserved."""
    run(node, "sysctl", "-qw", "net.ipv4.ip_local_port_range=20000 60999")
    assert levels(checked(), "node-ports") == ["warn"]
    assert levels(checked("--node-port-range", "10000-19999"), "node-ports") == ["ok"]
    run(node, "sysctl", "-qw", "net.ipv4.ip_local_reserved_ports=30000-31000,31001-32767")
    assert levels(checked(), "node-ports") == ["ok"]


def test_connections(node: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connections of this namespace are counted against the limit, which is one for the whole kernel."""
    flow = ("-p", "udp", "-s", "10.1.0.1", "-d", "10.1.0.2", "--dport", "53", "--timeout", "60")
    for port in ("4001", "4002", "4003"):
        run(node, "conntrack", "-I", *flow, "--sport", port)
    (found,) = of(checked(), "conntrack")
    assert found["level"] == "ok"
    assert found["message"].startswith("3 connections of ")
    read = command._read
    monkeypatch.setattr(command, "_read", lambda name: "3" if name.endswith("_max") else read(name))
    assert levels(checked(code=1), "conntrack") == ["fail"]


def test_a_port_is_taken(node: Runner) -> None:
    """A program on the agent's port fails and is named; the port of another one is not its affair."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        document = checked("--healthz-bind-address", f"0.0.0.0:{port}", code=1)
        assert levels(document, "ports") == ["fail", "ok"]
        assert f"(process {os.getpid()})" in of(document, "ports")[0]["message"]
    assert levels(checked("--healthz-bind-address", f"0.0.0.0:{port}"), "ports") == ["ok", "ok"]


@pytest.fixture
def kube_proxy(namespace: str) -> Iterator[int]:
    """A process of that name in the namespace."""
    words = ("ip", "netns", "exec", namespace, "bash", "-c", "exec -a kube-proxy sleep 60")
    with subprocess.Popen(words) as process:
        deadline = time.monotonic() + 5
        while not Path(f"/proc/{process.pid}/cmdline").read_text().startswith("kube-proxy\0"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process.pid
        process.kill()


def test_kube_proxy_runs(node: Runner, kube_proxy: int) -> None:
    """A kube-proxy that runs here is seen, from another network namespace it is not."""
    (found,) = of(checked(), "proxies")
    assert found["level"] == "warn"
    assert found["message"] == f"kube-proxy is running (process {kube_proxy})"
    assert kube_proxy not in [it.pid for it in run_in_new_namespace(processes.namespace_processes)]


def limited(runner: Runner, capabilities: str) -> Outcome:
    """The command in a process with these capabilities only."""
    keep = ("setpriv", "--inh-caps=-all", f"--bounding-set=-all{capabilities}")
    return runner.run((*keep, sys.executable, "-c", COMMAND, "-o", "json"))


def test_no_namespace_for_a_trial(node: Runner) -> None:
    """Without the right to make a namespace the kernel is asked, and the report says so."""
    outcome = limited(node, ",+net_admin,+net_raw")
    document = json.loads(outcome.stdout)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert levels(document, "kernel") == ["skip", "skip"]
    assert "looked up, not tried" in of(document, "kernel")[0]["message"]


def test_no_rights(node: Runner) -> None:
    """Without any rights the report is made all the same, and says what it could not look at."""
    open_iptables(Backend.LEGACY, Family.IPV4, node).restore("*nat\nCOMMIT\n")
    outcome = limited(node, "")
    document = json.loads(outcome.stdout)
    assert (outcome.exit_code, outcome.stderr) == (1, "")
    assert levels(document, "privileges") == ["fail"]
    assert levels(document, "other-tables") == ["skip", "ok"]
    for name in ("kernel", "tables", "leftovers"):
        assert set(levels(document, name)) == {"skip"}
        assert of(document, name)[0]["message"].endswith("not permitted")
    assert levels(document, "forwarding") == ["ok", "ok"]
