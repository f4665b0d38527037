"""`pykubeproxy check` on nodes in different states."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pykubeproxy.cli import check as command
from pykubeproxy.kernel import Backend, Iptables, Runner, legacy, open_iptables, system
from pykubeproxy.kernel import runner as runner_module
from pykubeproxy.kernel.runner import CommandResult
from pykubeproxy.kernel.system import run_in_new_namespace
from pykubeproxy.nodes import this_node_checks
from pykubeproxy.nodes.live_firewalls import firewall_warnings
from pykubeproxy.objects import Family
from tests.cases import as_restore_input
from tests.fakes.process import path_without_ip6tables
from tests.fakes.waiting import eventually

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
    """A node with IP forwarding."""
    run(runner, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    return runner


def run(runner: Runner, *words: str) -> None:
    outcome = runner.run(words)
    assert outcome.exit_code == 0, outcome.stderr


def checked(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(command.check, ["-o", "json", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    (found,) = json.loads(result.stdout)["nodes"]
    assert found["passed"] is (code == 0)
    return dict(found)


def of(document: dict[str, Any], name: str, family: str | None = None) -> list[dict[str, str]]:
    found = [
        check for check in document["checks"] if check["check"] == name and family in (None, check["family"])
    ]
    assert found
    return found


def levels(document: dict[str, Any], name: str) -> list[str]:
    return [check["level"] for check in of(document, name)]


def node_state(runner: Runner) -> list[object]:
    """Return everything that a check might change."""
    legacy_tables = [legacy.legacy_tables(family) for family in Family]
    saved = [
        open_iptables(backend, family, runner).save_counted() for backend in Backend for family in Family
    ]
    return [legacy_tables, saved, runner.run(("nft", "list", "ruleset")).stdout]


def proxy_rules(runner: Runner, backend: Backend) -> Iptables:
    """Write kube-proxy's rules of one case."""
    iptables = open_iptables(backend, Family.IPV4, runner)
    iptables.restore(as_restore_input("kube-dns", Family.IPV4))
    return iptables


def test_a_fresh_node_passes(node: Runner, backend: Backend) -> None:
    """Every check runs and changes nothing."""
    before = node_state(node)
    document = checked("--iptables-backend", backend.value)
    assert node_state(node) == before
    assert {check["check"] for check in document["checks"]} == CHECKS
    assert document["backend"] == backend.value
    assert {check["level"] for check in document["checks"]} == {"ok", "skip"}
    assert "was tried and works" in of(document, "kernel", "IPv6")[0]["message"]


def test_proxy_rules_in_the_backend_in_use_pass(node: Runner, backend: Backend) -> None:
    """The rules are kept."""
    proxy_rules(node, backend)
    before = node_state(node)
    document = checked()
    assert document["backend"] == backend.value
    assert f"{backend.value} is used, with " in of(document, "tables", "IPv4")[0]["message"]
    assert set(levels(document, "other-tables")) == {"ok"}
    assert node_state(node) == before


def test_change_to_nftables_mode(node: Runner, backend: Backend) -> None:
    """It needs nothing of the kernel but its version, and changes nothing."""
    run(node, "ip", "address", "add", "192.168.99.10/24", "dev", "lo")
    iptables = open_iptables(backend, Family.IPV4, node)
    iptables.restore(as_restore_input("nodeport", Family.IPV4))
    before = node_state(node)
    document = checked("--migrate-to", "nftables", code=1)
    assert document["migrateTo"] == "nftables"
    assert levels(document, "kernel") == levels(document, "nft") == ["ok"]
    primary, local = of(document, "node-ports")
    assert primary["message"].startswith("node ports are served at the primary address of the node only")
    assert local["message"] == (
        "node ports are not served at 127.0.0.1 in nftables mode, whatever its settings: ns1/web:http (30080)"
    )
    set_ = checked("--migrate-to", "nftables", "--nodeport-addresses", "10.0.0.0/8", code=1)
    assert of(set_, "node-ports")[0]["message"] == (
        "node ports are not served at 192.168.99.10 in nftables mode: ns1/web:http (30080)"
    )
    all_ = checked("--migrate-to", "nftables", "--nodeport-addresses", "all", code=1)
    assert levels(all_, "node-ports") == ["fail"]
    assert levels(checked("--migrate-to", "iptables"), "mode") == ["ok"]
    assert node_state(node) == before


def test_status_names_rules_that_stop_packets_to_services(node: Runner, backend: Backend) -> None:
    proxy_rules(node, backend)
    assert firewall_warnings(backend.value) == ()
    run(
        node,
        "nft",
        "add table inet fw; add chain inet fw in { type filter hook forward priority 5; policy drop; }",
    )
    (warning,) = firewall_warnings(backend.value)
    assert warning.startswith("chain in of nftables table inet fw drops packets to ")


def test_proxy_rules_in_the_other_backend_fail(node: Runner, backend: Backend) -> None:
    """The rules are kept."""
    proxy_rules(node, OTHER[backend])
    before = node_state(node)
    document = checked("--iptables-backend", backend.value, code=1)
    assert levels(document, "other-tables") == ["fail", "ok"]
    assert "the agent removes them" in of(document, "other-tables")[0]["advice"]
    assert node_state(node) == before


def test_foreign_rules_in_the_other_backend_are_a_warning(node: Runner, backend: Backend) -> None:
    """Also if only built-in chains have any."""
    iptables = open_iptables(OTHER[backend], Family.IPV4, node)
    iptables.restore("*filter\n-A FORWARD -p udp -j DROP\nCOMMIT\n")
    document = checked("--iptables-backend", backend.value)
    assert levels(document, "other-tables") == ["warn", "ok"]
    assert "(FORWARD)" in of(document, "other-tables")[0]["message"]


def test_python_iptables_reads_legacy_tables(inside: str, runner: Runner) -> None:
    """Chains and numbers of rules equal iptables-legacy-save; no table is created."""
    assert legacy.legacy_chains(Family.IPV4) == {}
    live = proxy_rules(runner, Backend.LEGACY).save()
    tables = legacy.legacy_tables(Family.IPV4)
    found = legacy.legacy_chains(Family.IPV4)
    assert found == {key: len(rules) for key, rules in live.chains.items()}
    assert sum(found.values()) > 10
    assert legacy.legacy_tables(Family.IPV4) == tables
    assert legacy.legacy_tables(Family.IPV6) == ()


def test_python_iptables_loads_no_module(inside: str, runner: Runner) -> None:
    """modprobe runs without the right to load one."""
    snippet = (
        "import sys, ctypes; sys.argv[1:] = ['IPv4'];"
        "import runpy; runpy.run_module('pykubeproxy.kernel.legacy', run_name='__main__');"
        "print(ctypes.CDLL(None).prctl(23, 16, 0, 0, 0))"
    )
    outcome = runner.run((sys.executable, "-c", snippet))
    assert outcome.stdout == "{}0\n", outcome.stderr


def test_disabled_forwarding_fails_by_family(inside: str, runner: Runner) -> None:
    """IPv6 only if the node uses it. Only mode ClusterCIDR uses clusterCIDR."""
    # A new namespace inherits the machine's setting.
    run(runner, "sysctl", "-qw", "net.ipv4.ip_forward=0")
    document = checked(code=1)
    assert levels(document, "forwarding") == ["fail", "ok"]
    dual_stack = ("--cluster-cidr", "10.244.0.0/16,fd00:10:244::/56")
    document = checked(*dual_stack, "--detect-local-mode", "NodeCIDR", code=1)
    assert levels(document, "forwarding") == ["fail", "ok"]
    document = checked(*dual_stack, code=1)
    assert levels(document, "forwarding") == ["fail", "fail"]
    assert of(document, "forwarding", "IPv6")[0]["advice"] == "Set net.ipv6.conf.all.forwarding = 1."


def test_leftovers_of_other_modes_are_found(node: Runner) -> None:
    """nftables tables are a warning, an ipvs interface fails."""
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


def test_bridge_netfilter_is_checked_if_a_bridge_exists(node: Runner) -> None:
    run(node, "ip", "link", "add", "cni0", "type", "bridge")
    seen = node.read("/proc/sys/net/bridge/bridge-nf-call-iptables") == "1\n"
    assert levels(checked(), "br-netfilter") == ["ok" if seen else "warn"]
    mode = ("--detect-local-mode", "BridgeInterface", "--pod-bridge-interface", "cni0")
    assert levels(checked(*mode, code=0 if seen else 1), "br-netfilter") == ["ok" if seen else "fail"]


def test_strict_reverse_path_filtering_is_a_warning(node: Runner) -> None:
    """Only with two routes to the node; addresses of single pods do not count."""
    for name, network in (("a", "10.1.0.1/24"), ("b", "10.2.0.1/24"), ("pod", "10.3.0.1/32")):
        run(node, "ip", "link", "add", f"up-{name}", "type", "veth", "peer", "name", f"x-{name}")
        run(node, "ip", "address", "add", network, "dev", f"up-{name}")
    run(node, "sysctl", "-qw", "net.ipv4.conf.up-a.rp_filter=1", "net.ipv4.conf.up-pod.rp_filter=1")
    document = checked()
    assert levels(document, "rp-filter") == ["warn"]
    assert of(document, "rp-filter")[0]["message"] == "rp_filter is strict on up-a"
    run(node, "sysctl", "-qw", "net.ipv4.conf.all.rp_filter=2")
    assert levels(checked(), "rp-filter") == ["ok"]


def test_node_ports_in_the_local_port_range_are_a_warning(node: Runner) -> None:
    """Unless all of them are reserved."""
    run(node, "sysctl", "-qw", "net.ipv4.ip_local_port_range=20000 60999")
    assert levels(checked(), "node-ports") == ["warn"]
    assert levels(checked("--node-port-range", "10000-19999"), "node-ports") == ["ok"]
    run(node, "sysctl", "-qw", "net.ipv4.ip_local_reserved_ports=30000-31000,31001-32767")
    assert levels(checked(), "node-ports") == ["ok"]


def test_connections_are_compared_with_the_limit(node: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of this namespace, with the kernel-wide limit."""
    flow = ("-p", "udp", "-s", "10.1.0.1", "-d", "10.1.0.2", "--dport", "53", "--timeout", "60")
    for port in ("4001", "4002", "4003"):
        run(node, "conntrack", "-I", *flow, "--sport", port)
    (found,) = of(checked(), "conntrack")
    assert found["level"] == "ok"
    assert found["message"].startswith("3 connections of ")
    read = this_node_checks._read
    monkeypatch.setattr(this_node_checks, "_read", lambda name: "3" if name.endswith("_max") else read(name))
    assert levels(checked(code=1), "conntrack") == ["fail"]


def test_a_used_port_fails_and_names_the_program(node: Runner) -> None:
    """Ports outside the agent's configuration are ignored."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        document = checked("--healthz-bind-address", f"0.0.0.0:{port}", code=1)
        assert levels(document, "ports") == ["fail", "ok"]
        assert f"(process {os.getpid()})" in of(document, "ports")[0]["message"]
    assert levels(checked("--healthz-bind-address", f"0.0.0.0:{port}"), "ports") == ["ok", "ok"]


@pytest.fixture
def kube_proxy(namespace: str) -> Iterator[int]:
    """A process with the name kube-proxy in the namespace."""
    words = ("ip", "netns", "exec", namespace, "bash", "-c", "exec -a kube-proxy sleep 600")
    with subprocess.Popen(words) as process:
        eventually(lambda: Path(f"/proc/{process.pid}/cmdline").read_text().startswith("kube-proxy\0"))
        yield process.pid
        process.kill()


def test_kube_proxy_in_the_same_network_namespace_is_found(node: Runner, kube_proxy: int) -> None:
    """One in another network namespace is not."""
    (found,) = of(checked(), "proxies")
    assert found["level"] == "warn"
    assert found["message"] == f"kube-proxy is running (process {kube_proxy})"
    assert kube_proxy not in [process.pid for process in run_in_new_namespace(system.namespace_processes)]


def limited(runner: Runner, capabilities: str) -> CommandResult:
    """Run the command with these capabilities only."""
    keep = ("setpriv", "--inh-caps=-all", f"--bounding-set=-all{capabilities}")
    return runner.run((*keep, sys.executable, "-c", COMMAND, "-o", "json"))


def test_without_a_trial_namespace_the_kernel_is_probed(node: Runner) -> None:
    """The report says so."""
    outcome = limited(node, ",+net_admin,+net_raw")
    (document,) = json.loads(outcome.stdout)["nodes"]
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert levels(document, "kernel") == ["skip", "skip"]
    assert "looked up, not tried" in of(document, "kernel")[0]["message"]


def test_without_capabilities_the_report_is_complete(node: Runner) -> None:
    """It names the checks that could not run."""
    open_iptables(Backend.LEGACY, Family.IPV4, node).restore("*nat\nCOMMIT\n")
    outcome = limited(node, "")
    (document,) = json.loads(outcome.stdout)["nodes"]
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert (document["passed"], document["complete"]) == (True, False)
    assert levels(document, "privileges") == ["skip"]
    assert levels(document, "other-tables") == ["skip", "ok"]
    for name in ("kernel", "tables", "leftovers"):
        assert set(levels(document, name)) == {"skip"}
        assert of(document, name)[0]["message"].endswith("not permitted")
    assert levels(document, "forwarding") == ["ok", "ok"]


def test_a_node_without_ipv6_passes_unless_the_cluster_uses_it(node: Runner) -> None:
    """As the agent starts or not."""
    run(node, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
    document = checked()
    assert set(levels(document, "kernel")) == {"ok"}
    message = "IPv6 is disabled (net.ipv6.conf.all.disable_ipv6 = 1), and the node does not use it"
    assert of(document, "kernel", "IPv6")[0]["message"].startswith(message)
    document = checked("--cluster-cidr=10.244.0.0/16,fd00:10::/48", code=1)  # IPv6 is not forwarded
    assert levels(document, "kernel") == ["ok", "warn"]
    document = checked("--cluster-cidr=fd00:10::/48", code=1)
    assert (
        "has no IPv4 network, which this node needs; IPv6 is disabled"
        in of(document, "networks")[0]["message"]
    )
    assert levels(checked("--bind-address=fd00::1", code=1), "kernel") == ["ok", "fail"]


def test_missing_commands_of_one_family_are_a_warning(
    node: Runner, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent then serves the other family."""
    monkeypatch.setattr(runner_module, "_SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", path_without_ip6tables(tmp_path))
    document = checked("--iptables-backend", backend.value)
    assert levels(document, "iptables") == ["ok", "warn"]
    assert of(document, "iptables", "IPv6")[0]["advice"].endswith("Until then IPv6 is not served.")
    assert levels(document, "tables") == ["ok", "skip"]
    assert levels(checked("--bind-address=fd00::1", code=1), "iptables") == ["ok", "fail"]
