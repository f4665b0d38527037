"""Explain recorded services of every kind: against golden files and against their rules.

`python -m tests.unit.inspect.test_explain` rewrites the golden files for review.
"""

from pathlib import Path

import click
import msgspec
import pytest

from pykubeproxy.config import load
from pykubeproxy.inspect.dump.model import ServiceView, views
from pykubeproxy.inspect.explain.model import (
    Explanation,
    PortExplanation,
    explain,
    explain_all,
    explain_nodes,
)
from pykubeproxy.inspect.explain.notes import notes
from pykubeproxy.inspect.explain.report import ExplainReport, explain_report
from pykubeproxy.inspect.explain.sentences import skip_message
from pykubeproxy.inspect.routes import Policy
from pykubeproxy.inspect.targets import parse_filter
from pykubeproxy.objects import Family, Key, Node, Updated
from pykubeproxy.report.document import document as as_document
from pykubeproxy.report.document import json_text
from pykubeproxy.report.text import text as as_text
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import NodeTopology
from tests.cases import ADDRESSES, NAMES, cluster_of, config_of, load_case, node_of
from tests.objects import endpoint, service, slice_of

FOLDER = Path(__file__).parents[2] / "data" / "explain"
CASES = (
    "affinity-timeout",
    "all-notready",
    "dual-stack",
    "duplicate-endpoint-two-slices",
    "externalips",
    "externalname",
    "foreign-port-name",
    "fqdn-slice",
    "headless",
    "itp-local-nodeport",
    "kube-dns",
    "lb-local",
    "lb-local-none",
    "lb-source-ranges",
    "no-endpoints-lb",
    "nodeport-addresses-v6",
    "service-proxy-name",
    "terminating-fallback",
    "terminating-with-ready",
    "topology-node-none-here",
    "topology-zone",
    "topology-zone-missing-hint",
    "topology-zone-no-label",
)
DOCUMENTS = ("dual-stack", "headless", "lb-local", "topology-zone-missing-hint")


def contexts(case: str) -> dict[Family, RuleContext]:
    loaded = load_case(case)
    node = node_of(loaded)
    return {
        family: rule_context(config_of(loaded), node.name, node, KernelFacts(addresses=ADDRESSES), family)
        for family in Family
    }


def explained(case: str, *nodes: Node) -> ExplainReport:
    """Explain the Services of a case on these nodes, by default on that of the case."""
    cluster = cluster_of(load_case(case))
    wanted = nodes or (node_of(load_case(case)),)
    services = sorted(it.key for it in cluster.services() if it.namespace != "default")
    found: list[Explanation] = []
    for key in services:
        found += explain_nodes(cluster, parse_filter(str(key)), wanted, lambda node: contexts_on(case, node))
    return explain_report(found, wanted)


def contexts_on(case: str, node: Node) -> dict[Family, RuleContext]:
    topology = NodeTopology(node.name, node.zone)
    return {family: msgspec.structs.replace(it, node=topology) for family, it in contexts(case).items()}


def text(case: str, *nodes: Node, wide: bool = False) -> str:
    return click.unstyle(as_text(explained(case, *nodes).blocks(wide=wide)))


def document(case: str) -> str:
    return json_text(as_document(explained(case)))


@pytest.mark.parametrize("case", CASES)
def test_text_equals_golden_file(case: str) -> None:
    """Endpoints with reasons and frontends, within 80 columns."""
    assert text(case) == (FOLDER / f"{case}.txt").read_text()
    assert max(map(len, text(case).splitlines())) <= 80


@pytest.mark.parametrize("case", DOCUMENTS)
def test_json_equals_golden_file(case: str) -> None:
    assert document(case) == (FOLDER / f"{case}.json").read_text()


@pytest.mark.parametrize("case", NAMES)
def test_explanations_agree_with_the_rules(case: str) -> None:
    """Shares, chains, verdicts and frontends equal those of the rendered rules."""
    cluster = cluster_of(load_case(case))
    for family, context in contexts(case).items():
        ruleset = render(cluster, context)
        views_by_port = {(view.name, view.policy): view for view in views(ruleset, {})}
        for service_ in cluster.services():
            for port in explain(cluster, service_, {family: context}).ports:
                _check(port, views_by_port, {key.chain for key in ruleset.chains})


def _check(
    port: PortExplanation, views_by_port: dict[tuple[PortName, Policy], ServiceView], chains: set[str]
) -> None:
    for policy in port.policies:
        view = views_by_port.get((port.name, policy.policy))
        (group,) = policy.groups
        if group.serves and (policy.frontends or policy.from_this_node):
            assert view
            assert policy.chain in chains
            explained_shares = {(it.address, it.port): it.share for it in group.endpoints if it.share}
            rule_shares = {(it.address, it.port): it.share for it in view.endpoints}
            assert explained_shares == pytest.approx(rule_shares, abs=1e-8)
            assert _addresses(policy.frontends) == _addresses(view.frontends)
            assert _addresses(policy.from_this_node) == _addresses(view.from_this_node)
        elif policy.frontends:
            # Rejecting rules do not contain the policy.
            views_ = [views_by_port[it] for it in views_by_port if it[0] == port.name]
            assert group.verdict in {it.verdict for it in views_}
            assert not policy.chain


def _addresses(frontends: object) -> set[tuple[int, str]]:
    """Return ports and addresses of frontends, node ports without address."""
    return {
        (it.port, "" if it.kind.value == "node-port" else it.address)
        for it in frontends  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("case", NAMES)
def test_masquerading_notes_agree_with_the_rules(case: str) -> None:
    """For internal and external traffic."""
    cluster = cluster_of(load_case(case))
    for family, context in contexts(case).items():
        ruleset = render(cluster, context)
        for service_ in cluster.services():
            for port in explain(cluster, service_, {family: context}).ports:
                output = " ".join(notes(port))
                chain = next((it.chain for it in port.policies if it.chain), "")
                if not chain:
                    assert "client's address" not in output
                    continue
                internal = Policy.LOCAL if port.port.internal_local else Policy.CLUSTER
                rules = [
                    rule
                    for it in port.policies
                    if it.policy is internal
                    for rule in ruleset.chains.get(ChainKey("nat", it.chain or ""), ())
                ]
                marking = [rule for rule in rules if rule.endswith("KUBE-MARK-MASQ")]
                if rules:
                    conditional = any("! -s" in rule or "! -i" in rule for rule in marking)
                    assert ("other traffic is masqueraded" in output) == conditional
                    assert ("address replaces every client's address" in output) == bool(
                        marking and not conditional
                    )
                external = ruleset.chains.get(ChainKey("nat", f"KUBE-EXT-{chain[-16:]}"))
                assert ("raffic from outside" in output) == bool(external)
                if external:
                    unconditional = [rule for rule in external if "masquerade traffic for" in rule]
                    assert ("For traffic from outside" in output) == bool(unconditional)


HERE, THERE = Node("node1", zone="zone-a"), Node("node2", zone="zone-b")


def test_nodes_with_other_endpoints_have_a_part_each() -> None:
    lines = text("lb-local", THERE, HERE).splitlines()
    start = lines.index("  Policy Local, chain KUBE-SVL-4LVCYZMTA5CQO6SX")
    assert lines[start + 1 : start + 7] == [
        "    On node2 in zone-b:",
        "      100%  10.244.2.12:8080  on node2: ready",
        "      1 endpoint on other nodes",
        "    On node1 in zone-a:",
        "      100%  10.244.1.11:8080  on node1: ready",
        "      1 endpoint on other nodes",
    ]
    assert "on another node, and the traffic policy is Local" in " ".join(
        text("lb-local", THERE, HERE, wide=True).split()
    )


def test_wide_has_the_place_of_each_endpoint() -> None:
    rows = [line.split() for line in text("lb-local", THERE, wide=True).splitlines()]
    assert ["SHARE", "ENDPOINT", "NODE", "ZONE", "POD", "REASON"] in rows
    assert ["100%", "10.244.2.12:8080", "node2", "ready"] in rows


def test_nodes_with_the_same_endpoints_have_one_part() -> None:
    assert "    On node2 in zone-b and node1 in zone-a:\n" in text("dual-stack", THERE, HERE)


def cluster(*objects: object) -> Cluster:
    objects_ = Cluster()
    for it in objects:
        objects_.apply(Updated(it))  # type: ignore[arg-type]
    return objects_


def web(*objects: object, **config: str) -> PortExplanation:
    """Explain the IPv4 port of ns/web among these objects, for node1 in zone-a."""
    node = Node("node1", ("192.168.99.10",), zone="zone-a")
    context = rule_context(load(None, config).config, node.name, node, KernelFacts(), Family.IPV4)
    objects_ = cluster(*objects)
    service_ = objects_.service(Key("ns", "web"))
    assert service_
    (port,) = explain(objects_, service_, {Family.IPV4: context}).ports
    return port


def test_slices_of_the_other_family_are_skipped() -> None:
    """The reason is shown only if the Service has no address of that family."""
    six = slice_of("fd00::1", name="six")
    port = web(service(), slice_of("10.0.0.1"), six)
    assert [skip_message(it) for it in port.skipped] == []
    single = explain(
        cluster(service(), six),
        service(),
        dict.fromkeys(Family, port.context),
    )
    output = [skip_message(it) for it in single.ports[0].skipped]
    assert output == ["slice six: it is of the other address family"]


def test_the_slice_of_a_service_without_pods_is_not_named() -> None:
    """The controller makes one without endpoints and ports."""
    port = web(service(), slice_of(ports=()))
    assert port.skipped == ()


def test_skipped_entries_name_their_slice() -> None:
    port = web(service(), slice_of("10.0.0.1", endpoint(""), name="s1"))
    assert [skip_message(it) for it in port.skipped] == ["an endpoint in slice s1: it has no address"]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "the configuration does not define pod traffic"),
        ({"cluster-cidr": "0.0.0.0/0"}, "every address counts as a pod's (0.0.0.0/0)"),
        ({"masquerade-all": "true"}, "address replaces every client's address"),
        (
            {"detect-local-mode": "BridgeInterface", "pod-bridge-interface": "cbr0"},
            "traffic that comes in on cbr0 keeps",
        ),
    ],
)
def test_each_detect_mode_has_a_sentence(config: dict[str, str], sentence: str) -> None:
    assert sentence in " ".join(notes(web(service(), slice_of("10.0.0.1"), **config)))


def test_disabled_external_ips_are_named() -> None:
    """With the feature gate off."""
    config = load(None, {"feature-gates": "AllowServiceExternalIPs=false"}).config
    context = rule_context(config, "node1", Node("node1"), KernelFacts(), Family.IPV4)
    objects_ = service(external_ips=("192.0.2.1",))
    (found,) = explain_nodes(
        cluster(objects_), parse_filter("web"), [Node("node1")], lambda _: {Family.IPV4: context}
    )
    output = as_text(explain_report([found], [Node("node1")]).blocks(wide=False))
    assert "  Its external IP 192.0.2.1 is not served" in output


def test_unknown_services_and_ports_are_errors() -> None:
    """The error lists what exists; a Service without rules has its reason."""
    objects_ = cluster(service(), service("none", headless=True, cluster_ips=()))
    context = contexts("dual-stack")
    with pytest.raises(
        LookupError, match=r"^there is no Service web2 in any namespace; did you mean ns/web\?$"
    ):
        explain_all(objects_, parse_filter("web2"), context)
    with pytest.raises(LookupError, match=r"^there is no Service other/web; did you mean ns/web\?$"):
        explain_all(objects_, parse_filter("other/web"), context)
    with pytest.raises(LookupError, match=r"^there is no Service xyz .*; check its name and namespace$"):
        explain_all(objects_, parse_filter("xyz"), context)
    with pytest.raises(LookupError, match=r'Service ns/web has no port "https"; it has 80 \(http\)'):
        explain_all(objects_, parse_filter("ns/web:https"), context)
    assert [it.name.port for it in explain_all(objects_, parse_filter("web:80"), context)[0].ports] == [
        "http"
    ]
    assert explain_all(objects_, parse_filter("none:80"), context)[0].skipped


def test_affinity_that_is_not_kept_is_explained() -> None:
    """With the lists that the Service needs, those of a namespace, and the setting."""
    made = service(affinity_seconds=60), slice_of("10.0.0.1", "10.0.0.2")
    assert (
        "Session affinity is not kept: it needs 2 lists of clients, and the Services of a namespace may have 1, the oldest"
        in (" ".join(notes(web(*made, **{"max-affinity-lists": "1"}))))
    )
    (found,) = [it for it in notes(web(*made)) if "ffinity" in it]
    assert found.startswith("A client keeps its endpoint for 1 min")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        (FOLDER / f"{case}.txt").write_text(text(case))
    for case in DOCUMENTS:
        (FOLDER / f"{case}.json").write_text(document(case))
