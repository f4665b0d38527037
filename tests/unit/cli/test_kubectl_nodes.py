"""`kubectl pykubeproxy dump-rules`, `status` and `check`: the nodes of a cluster, from outside."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pykubeproxy.cli.kubectl import plugin
from tests.cases import nft_list
from tests.fakes.faulty_apiserver import Order
from tests.fakes.remote_nodes import AGENT, KUBELET_ONLY, SERVING, RemoteNodes

STATUS = {
    "apiVersion": "pykubeproxy/v1",
    "version": "0.1.0",
    "node": "n2",
    "backend": "legacy",
    "started": 0,
    "now": 60,
    "healthy": True,
    "ready": True,
    "alive": True,
    "nodeEligible": True,
    "families": [],
}


DROPPING = {
    "family": "inet",
    "table": "fw",
    "name": "in",
    "type": "filter",
    "hook": "forward",
    "prio": 1,
    "policy": "drop",
}
# nft prints the same for each table.
NFT_NODE = json.dumps({"nftables": [{"chain": DROPPING}, *json.loads(nft_list("nodeport"))["nftables"]]})


def status_of(agent: dict[str, Any]) -> str:
    """Return what the status command of an agent prints."""
    nodes = [{"node": agent["node"], "agent": agent}]
    return json.dumps(
        {"apiVersion": "pykubeproxy/v1", "kind": "Status", "healthy": True, "time": 60.0, "nodes": nodes}
    )


def checks_of(*checks: dict[str, Any]) -> str:
    """Return what the check command of an agent prints."""
    node = {"node": "n2", "checks": checks, "passed": True, "complete": True}
    return json.dumps({"apiVersion": "pykubeproxy/v1", "kind": "Check", "passed": True, "nodes": [node]})


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteNodes]:
    """A node with kube-proxy, one with our agent, and one with Cilium."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with RemoteNodes(tmp_path) as running:
        running.pod("p1", "n1", restarts=2)
        running.saves("p1", "nft", SERVING)
        running.pod("p2", "n2", AGENT, container="agent", image="pykubeproxy:0.1.0")
        running.saves("p2", "nft", SERVING)
        running.program("p2", "pykubeproxy", status_of(STATUS))
        running.pod("cilium-1", "n3", {"k8s-app": "cilium"})
        yield running


def invoke(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(plugin, arguments, terminal_width=80)
    assert result.exit_code == code, result.output
    return result


def printed(*arguments: str, code: int = 0) -> dict[str, Any]:
    document = json.loads(invoke(*arguments, "-o", "json", code=code).stdout)
    assert document.pop("apiVersion") == "pykubeproxy/v1"
    return dict(document)


def test_dump_rules_of_one_node(cluster: RemoteNodes) -> None:
    text = invoke("dump-rules", "--node", "n1").stdout
    assert text == (
        "# Node n1, kube-proxy v1.35.1, pod kube-system/p1\n"
        "default/web:http  TCP\n"
        "  Cluster  cluster IP 10.96.0.10:80\n"
        "     100%  10.244.1.5:8080  7 packets\n"
    )


def test_dump_rules_of_all_nodes(cluster: RemoteNodes) -> None:
    """A node with another proxy is no failure."""
    result = invoke("dump-rules")
    assert "# Node n1, " in result.stdout and "# Node n2, pykubeproxy 0.1.0, " in result.stdout
    assert result.stderr == "n3: runs Cilium and no kube-proxy\n"


def test_dump_rules_as_json(cluster: RemoteNodes) -> None:
    cluster.node("n4")
    document = printed("dump-rules", code=2)
    assert [(it["node"], it["proxy"], it["pod"], it["otherProxy"]) for it in document["nodes"]] == [
        ("n1", "kube-proxy v1.35.1", "kube-system/p1", False),
        ("n2", "pykubeproxy 0.1.0", "kube-system/p2", False),
        ("n3", None, None, True),
        ("n4", None, None, False),
    ]
    (service,) = document["nodes"][0]["services"]
    assert (service["name"], service["endpoints"][0]["packets"]) == ("web", 7)
    assert document["nodes"][2]["unread"] == "runs Cilium and no kube-proxy"


def test_dump_rules_of_a_service(cluster: RemoteNodes) -> None:
    """A name without namespace is in that of the context."""
    assert "default/web" in invoke("dump-rules", "web", "--node", "n1").stdout
    for name in ("default/web", "svc/web:http", "web.default:80"):
        assert "default/web" in invoke("dump-rules", name, "--node", "n1").stdout
    result = invoke("dump-rules", "web", "--node", "n1", "-n", "other", code=2)
    assert result.stderr == "n1: there are no rules for other/web; did you mean default/web?\n"
    assert "-A KUBE-SVC-A" in invoke("dump-rules", "web", "--node", "n1", "-o", "rules").stdout


def test_status(cluster: RemoteNodes) -> None:
    lines = invoke("status").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["NODE", "n1", "n2", "n3", "It"]
    assert lines[1].split()[1:7] == ["kube-proxy", "v1.35.1", "iptables", "(nft)", "ready", "2"]
    assert lines[2].split()[1:7] == ["pykubeproxy", "0.1.0", "iptables", "(legacy)", "healthy", "0"]
    assert lines[4] == "  It runs Cilium and no kube-proxy."


def test_wide_status_adds_pods_and_all_about_agents(cluster: RemoteNodes) -> None:
    lines = [line.split() for line in invoke("status", "-o", "wide").stdout.splitlines()]
    assert [line[-1] for line in lines[:3]] == ["POD", "kube-system/p1", "kube-system/p2"]
    assert ["yes"] * 4 in [line[:4] for line in lines]


def test_status_orders_nodes_by_number_and_names_a_pod_that_is_not_ready(cluster: RemoteNodes) -> None:
    """Also beside an agent that is healthy."""
    for name in ("n10", "n4"):
        pod = f"p-{name}"
        cluster.pod(pod, name, AGENT, container="agent", image="pykubeproxy:0.1.0", ready=name != "n4")
        cluster.program(pod, "pykubeproxy", status_of(STATUS | {"node": name}))
    nodes = printed("status", code=1)["nodes"]
    assert [node["node"] for node in nodes] == ["n1", "n2", "n3", "n4", "n10"]
    assert (nodes[3]["state"], nodes[3]["problem"]) == ("not ready", "pod kube-system/p-n4 is not ready")
    assert (nodes[4]["state"], nodes[4]["problem"]) == ("healthy", "")


def test_status_of_a_node_with_a_problem(cluster: RemoteNodes) -> None:
    cluster.saves("p1", "nft", KUBELET_ONLY)
    cluster.saves("p1", "legacy", "")
    unwell = STATUS | {"healthy": False, "ready": False}
    cluster.program("p2", "pykubeproxy", status_of(unwell), code=1)
    document = printed("status", code=1)
    assert not document["healthy"]
    first, second, third = document["nodes"]
    assert first["problem"] == "no service-proxy rules; run `kubectl logs -n kube-system p1`"
    assert first["agent"] is None
    assert second["problem"] == "Not ready: the rules are not in place or not up to date yet."
    assert second["agent"]["node"] == "n2"
    assert (third["problem"], third["proxy"]) == ("", "")


FORGED = "nft\nn9    kube-proxy v1.35.1  iptables"


def test_node_cannot_forge_lines(cluster: RemoteNodes) -> None:
    cluster.program("p2", "pykubeproxy", status_of(STATUS | {"backend": FORGED}))
    assert [it.split()[:1] for it in invoke("status", "--node", "n2").stdout.splitlines()] == [
        ["NODE"],
        ["n2"],
    ]
    forged = {"check": FORGED, "level": "ok", "message": FORGED, "advice": FORGED, "family": None}
    cluster.program("p2", "pykubeproxy", checks_of(forged))
    lines = invoke("check", "--node", "n2").stdout.splitlines()
    assert not [it for it in lines if it.startswith("n9")]


def test_status_of_an_agent_that_does_not_answer(cluster: RemoteNodes) -> None:
    cluster.program("p2", "pykubeproxy", errors="Error: no agent\n", code=2)
    (entry,) = printed("status", "--node", "n2", code=1)["nodes"]
    assert entry["problem"] == "`pykubeproxy status` in pod kube-system/p2 failed: Error: no agent"


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (status_of(STATUS).replace("pykubeproxy/v1", "pykubeproxy/v99"), "its API version is pykubeproxy/v99"),
        (json.dumps({"apiVersion": "pykubeproxy/v1", "kind": "Status", "healthy": True, "time": 1, "nodes": [{"node": "n2"}]}), "says nothing"),
    ],
)  # fmt: skip
def test_an_answer_of_another_version_is_a_problem(cluster: RemoteNodes, document: str, problem: str) -> None:
    cluster.program("p2", "pykubeproxy", document)
    (entry,) = printed("status", "--node", "n2", code=1)["nodes"]
    assert problem in entry["problem"]


def test_names_of_all_nodes_come_once(cluster: RemoteNodes) -> None:
    assert invoke("dump-rules", "-o", "name").stdout == "svc/default/web:http\n"


NO_IPV6 = "IPv6 rules could not be read: ip6tables-nft-save exited with status 1: no IPv6"


def test_family_that_cannot_be_read_is_named(cluster: RemoteNodes) -> None:
    cluster.program("p1", "ip6tables-nft-save", errors="no IPv6", code=1)
    result = invoke("dump-rules", "--node", "n1")
    assert "default/web" in result.stdout and result.stderr == f"n1: {NO_IPV6}\n"
    assert printed("dump-rules", "--node", "n1")["nodes"][0]["remarks"] == [NO_IPV6]
    assert printed("status", "--node", "n1")["nodes"][0]["notes"] == [NO_IPV6]
    assert " ".join(invoke("status", "--node", "n1").stdout.split()).endswith(NO_IPV6)
    (entry,) = printed("check", "--node", "n1")["nodes"]
    assert not entry["complete"]
    skipped = [(it["check"], it["family"]) for it in entry["checks"] if it["level"] == "skip"]
    assert skipped == [("firewall", None), ("tables", "IPv6")]


def test_node_in_nftables_mode(cluster: RemoteNodes) -> None:
    """Its firewall drops what it forwards."""
    cluster.saves("p1", "nft", KUBELET_ONLY, KUBELET_ONLY)
    cluster.nft("p1", "table ip kube-proxy\ntable inet fw\n", NFT_NODE)
    assert "node port 192.168.99.10:30080" in invoke("dump-rules", "--node", "n1").stdout
    (entry,) = printed("status", "--node", "n1")["nodes"]
    assert (entry["mode"], entry["state"], entry["problem"]) == ("nftables", "ready", "")
    assert all("chain in of nftables table inet fw drops packets to " in note for note in entry["notes"])
    assert entry["notes"]
    (entry,) = printed("diff", "--node", "n1", "--sync-period", "0", code=1)["nodes"]
    assert (entry["verdict"], entry["settings"]["mode"]) == ("differs", "nftables")
    assert "web" in [service["name"] for service in entry["wrong"]]
    refused = invoke("diff", "--node", "n1", "-o", "rules", code=2)
    assert "in nftables mode" in refused.stderr
    (entry,) = printed("check", "--node", "n1")["nodes"]
    found = {it["check"]: it for it in entry["checks"]}
    assert found["mode"]["message"] == "the node runs kube-proxy v1.35.1 in nftables mode"
    assert found["firewall"]["level"] == "warn"
    assert "chain in of nftables table inet fw drops packets to " in found["firewall"]["message"]


def test_windows_node(cluster: RemoteNodes) -> None:
    """It has no fault."""
    cluster.node("n4", os="windows")
    lines = invoke("status", "--node", "n4").stdout.splitlines()
    assert lines[-1] == "  It runs Windows, whose proxies write no iptables rules."
    (entry,) = printed("check", "--node", "n4")["nodes"]
    assert [(it["check"], it["level"]) for it in entry["checks"]] == [("mode", "skip")]
    result = invoke("bundle", "--node", "n4", "--debug-image", "image:1")
    assert result.stderr == "n4: runs Windows, whose proxies write no iptables rules\n"
    assert cluster.debug_pods() == []


def test_check(cluster: RemoteNodes) -> None:
    """Our agent checks its node itself; what kube-proxy's pod and rules show is checked here."""
    own = {"check": "kernel", "level": "ok", "message": "works", "advice": "", "family": "IPv4"}
    cluster.program("p2", "pykubeproxy", checks_of(own))
    document = printed("check")
    assert document["passed"]
    first, second, third = document["nodes"]
    levels = {it["check"]: it["level"] for it in first["checks"]}
    expected = dict.fromkeys(("pod", "version", "tables", "jumps", "other-tables"), "ok") | {
        "firewall": "skip"
    }
    assert levels == expected
    assert second["checks"] == [own]
    assert [(it["check"], it["level"]) for it in third["checks"]] == [("mode", "skip")]


def test_check_fails_on_flushed_jumps(cluster: RemoteNodes) -> None:
    cluster.saves("p1", "nft", "".join(it + "\n" for it in SERVING.splitlines() if "OUTPUT -m" not in it))
    text = invoke("check", "--node", "n1", code=1).stdout
    assert "fail  jumps IPv4" in text
    assert "no jump from nat OUTPUT to\n" in text


def test_change_of_mode(cluster: RemoteNodes) -> None:
    """Our agent answers for its node; the rules of others are read."""
    own = {"check": "kernel", "level": "ok", "message": "works", "advice": "", "family": None}
    cluster.program("p2", "pykubeproxy", checks_of(own))
    cluster.node("n4", kernel="5.10.0+")
    cluster.pod("p4", "n4")
    cluster.saves("p4", "nft", SERVING)
    *_, fourth = printed("check", "--migrate-to", "nftables", code=1)["nodes"]
    assert [it["message"] for it in fourth["checks"] if it["level"] == "fail"] == [
        "kernel 5.10.0 is older than 5.13, so kube-proxy does not start in nftables mode"
    ]
    document = printed("check", "--migrate-to", "nftables", "--node", "n1", "--node", "n2", "--node", "n3")
    assert document["passed"]
    first, second, third = document["nodes"]
    assert {it["migrateTo"] for it in document["nodes"]} == {"nftables"}
    levels = {it["check"]: it["level"] for it in first["checks"]}
    assert levels == {"mode": "ok", "kernel": "skip", "other-ports": "warn", "foreign-rules": "ok"}
    assert second["checks"] == [own]
    assert [(it["check"], it["level"]) for it in third["checks"]] == [("mode", "skip")]


def test_change_of_mode_that_breaks_something(cluster: RemoteNodes) -> None:
    cluster.saves("p1", "nft", SERVING.replace("*nat\n", "*nat\n-A PREROUTING -j KUBE-MARK-MASQ\n", 1))
    text = invoke("check", "--node", "n1", "--migrate-to", "nftables", code=1).stdout
    assert "fail  foreign-rules IPv4" in text
    wrong = invoke("check", "--migrate-to", "nftables", "--nodeport-addresses", "x", code=2).stderr
    assert "must be CIDRs such as 10.244.0.0/16" in wrong


@pytest.mark.parametrize("command", ["status", "check", "bundle"])
def test_progress_counts_nodes(cluster: RemoteNodes, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    seen: list[str] = []

    @contextmanager
    def progress(total: int, label: str) -> Iterator[Callable[[], None]]:
        seen.append(f"{label}: {total}")
        yield lambda: seen.append("one")

    monkeypatch.setattr(f"pykubeproxy.cli.{command}.progress", progress)
    monkeypatch.chdir(cluster.kubeconfig.parent)
    CliRunner().invoke(plugin, [command])
    assert seen[0].endswith(" nodes: 3") and seen[1:] == ["one"] * 3


def test_check_of_a_node_that_cannot_be_read_does_not_pass(cluster: RemoteNodes) -> None:
    cluster.program("p1", "iptables-nft-save", errors="\x1b[2Jdenied", code=4)
    cluster.program("p1", "ip6tables-nft-save", code=4)
    assert "skip  tables" in invoke("check", code=2).stdout
    cluster.program("p2", "pykubeproxy", errors="Error: no agent\n", code=2)
    assert "skip  tables" in invoke("check", "--node", "n2", code=2).stdout


@pytest.mark.parametrize(
    "answer", ["{}", '{"apiVersion": "pykubeproxy/v1"}', '{"checks": [{"check": 1}]}', "{"]
)
def test_check_of_an_agent_without_a_report_does_not_pass(cluster: RemoteNodes, answer: str) -> None:
    cluster.program("p2", "pykubeproxy", answer)
    (entry,) = printed("check", "--node", "n2", code=2)["nodes"]
    assert not entry["complete"]
    assert "its agent is of another version" in entry["checks"][-1]["message"]


def test_node_that_does_not_exist(cluster: RemoteNodes) -> None:
    result = invoke("status", "--node", "n9", code=2)
    assert result.stderr == "Error: there is no node n9; run `kubectl get nodes`\n"


def test_cluster_that_cannot_be_asked(cluster: RemoteNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.api.faults.apply(Order(do="error", path="/nodes", status=403, times=10))
    forbidden = invoke("status", "--node", "n1", code=2).stderr
    assert "get and list of nodes are not permitted" in forbidden
    assert "manifests/inspect/rbac.yaml grants what is needed" in forbidden
    for asked in (
        ("trace", "node/n1", "svc/web"),
        ("trace", "node/n1", "10.0.0.1:80"),
        ("explain", "svc/web"),
    ):
        refused = invoke(*asked, code=2).stderr
        assert "get and list of" in refused and "manifests/inspect/rbac.yaml grants what is needed" in refused
    assert "it has no context 'x'" in invoke("status", "--node", "n1", "--context", "x", code=2).stderr
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", os.devnull)
    assert (
        "there is no kubeconfig; set --kubeconfig or KUBECONFIG"
        in invoke("status", "--node", "n1", code=2).stderr
    )


def test_a_server_that_never_answers_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykubeproxy.cli.sources._SILENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        url = f"http://127.0.0.1:{stuck.getsockname()[1]}"
        result = CliRunner().invoke(plugin, ["status", "--server", url, "--request-timeout", "1s"])
    assert result.exit_code == 2
    warning, error = result.stderr.splitlines()
    assert warning.startswith(f"{url} has not answered for 0 s; waiting up to 1 s")
    assert f"no response from {url} within 1 s" in error
