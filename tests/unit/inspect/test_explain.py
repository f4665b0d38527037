"""Why services are served as they are: recorded services of every kind against kept texts and against their rules.

`python -m tests.unit.inspect.test_explain` writes the kept texts anew, for their changes to be read.
"""

import json
from pathlib import Path

import click
import msgspec
import pytest

from pykubeproxy.config import load
from pykubeproxy.inspect.dump.model import ServiceView, Verdict, views
from pykubeproxy.inspect.explain import render_json, render_text
from pykubeproxy.inspect.explain.model import Explanation, PortExplanation, explain, explain_all
from pykubeproxy.inspect.explain.render_text import notes, skip_message
from pykubeproxy.inspect.filter import parse_filter
from pykubeproxy.inspect.routes import Policy
from pykubeproxy.objects import Family, Key, Node, Updated
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.cluster import Cluster
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


def on(case: str) -> dict[Family, RuleContext]:
    loaded = load_case(case)
    node = node_of(loaded)
    return {
        family: rule_context(config_of(loaded), node.name, node, KernelFacts(addresses=ADDRESSES), family)
        for family in Family
    }


def explained(case: str) -> list[Explanation]:
    cluster = cluster_of(load_case(case))
    services = sorted(cluster.services(), key=lambda service: service.key)
    return [explain(cluster, it, on(case)) for it in services if it.namespace != "default"]


def text(case: str) -> str:
    return click.unstyle(render_text.text(explained(case), on(case)[Family.IPV4].node))


def document(case: str) -> str:
    place = on(case)[Family.IPV4].node
    return json.dumps(render_json.document(explained(case), place), indent=1) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_text(case: str) -> None:
    """Each kind of service explained: endpoints with reasons, ways, terms; within 80 columns."""
    assert text(case) == (FOLDER / f"{case}.txt").read_text()
    assert max(map(len, text(case).splitlines())) <= 80


@pytest.mark.parametrize("case", DOCUMENTS)
def test_document(case: str) -> None:
    """The document for programs says the same."""
    assert document(case) == (FOLDER / f"{case}.json").read_text()


@pytest.mark.parametrize("case", NAMES)
def test_agrees_with_the_rules(case: str) -> None:
    """For every recorded case the shares, chains, verdicts and frontends are those that the rendered rules have."""
    cluster = cluster_of(load_case(case))
    for family, its_terms in on(case).items():
        ruleset = render(cluster, its_terms)
        of_rules = {(view.name, view.policy): view for view in views(ruleset, {})}
        for service_ in cluster.services():
            for port in explain(cluster, service_, {family: its_terms}).ports:
                _check(port, of_rules, {key.chain for key in ruleset.chains})


def _check(
    port: PortExplanation, of_rules: dict[tuple[object, Policy], ServiceView], chains: set[str]
) -> None:
    for policy in port.policies:
        view = of_rules.get((port.name, policy.policy))
        if policy.verdict is Verdict.DNAT and (policy.frontends or policy.from_this_node):
            assert view
            assert policy.chain in chains
            told = {
                (it.resolved.endpoint.address, it.resolved.port): it.share
                for it in policy.endpoints
                if it.share
            }
            shown = {(it.address, it.port): it.share for it in view.endpoints}
            assert told == pytest.approx(shown, abs=1e-8)
            assert _plain(policy.frontends) == _plain(view.frontends)
            assert _plain(policy.from_this_node) == _plain(view.from_this_node)
        elif policy.frontends:
            # Rules do not tell the policy of what is refused.
            views_ = [of_rules[it] for it in of_rules if it[0] == port.name]
            assert policy.verdict in {it.verdict for it in views_}
            assert not policy.chain


def _plain(frontends: object) -> set[tuple[int, str]]:
    """A frontend's port, and its address where that is one; node ports are shown at each address that has them."""
    return {
        (it.port, "" if it.kind.value == "node-port" else it.address)
        for it in frontends  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("case", NAMES)
def test_masquerading_as_told(case: str) -> None:
    """What is said of clients' addresses is what the chains for internal and external traffic do."""
    cluster = cluster_of(load_case(case))
    for family, its_terms in on(case).items():
        ruleset = render(cluster, its_terms)
        for service_ in cluster.services():
            for port in explain(cluster, service_, {family: its_terms}).ports:
                said = " ".join(notes(port))
                chain = next((it.chain for it in port.policies if it.chain), "")
                if not chain:
                    assert "client's address" not in said
                    continue
                internal = Policy.LOCAL if port.port.internal_local else Policy.CLUSTER
                rules = [
                    rule
                    for it in port.policies
                    if it.policy is internal
                    for rule in ruleset.chains.get(ChainKey("nat", it.chain), ())
                ]
                marking = [rule for rule in rules if rule.endswith("KUBE-MARK-MASQ")]
                if rules:
                    some = any("! -s" in rule or "! -i" in rule for rule in marking)
                    assert ("and else replaced" in said) == some
                    assert ("every client's address is replaced" in said) == bool(marking and not some)
                external = ruleset.chains.get(ChainKey("nat", f"KUBE-EXT-{chain[-16:]}"))
                assert ("From outside" in said) == bool(external)
                if external:
                    everybody = [rule for rule in external if "masquerade traffic for" in rule]
                    assert ("From outside, the client's address is replaced" in said) == bool(everybody)


def test_another_place() -> None:
    """Elsewhere other endpoints are used; the comparison names those that differ, with their reasons here."""
    cluster = cluster_of(load_case("lb-local"))
    there = _at(cluster, NodeTopology("node2", "zone-b"))
    here = explained("lb-local")
    said = click.unstyle(render_text.comparison(there, here, on("lb-local")[Family.IPV4].node))
    assert said.splitlines() == [
        "",
        "node1 in zone-a uses other endpoints:",
        "  ns1/web:http  TCP IPv4, policy Local",
        "    10.244.1.11:8080 is used: ready",
        "    10.244.2.12:8080 is not used: on another node, and the traffic policy is",
        "      Local (on node2)",
    ]
    document = render_json.document(
        there, NodeTopology("node2", "zone-b"), (here, NodeTopology("node1", "zone-a"))
    )
    differences = document["differences"]
    assert isinstance(differences, dict)
    assert differences["node"] == {"name": "node1", "zone": "zone-a"}
    assert [(it["address"], it["used"], it["reason"]) for it in differences["endpoints"]] == [
        ("10.244.1.11", True, "ready"),
        ("10.244.2.12", False, "not-local"),
    ]


def test_same_elsewhere() -> None:
    """Where nothing differs that is said too."""
    cluster = cluster_of(load_case("dual-stack"))
    said = render_text.comparison(
        _at(cluster, NodeTopology("node2"), "dual-stack"),
        explained("dual-stack"),
        NodeTopology("node1", "zone-a"),
    )
    assert click.unstyle(said) == "\nnode1 in zone-a uses the same endpoints.\n"


def _at(cluster: Cluster, place: NodeTopology, case: str = "lb-local") -> list[Explanation]:
    moved = {family: msgspec.structs.replace(it, node=place) for family, it in on(case).items()}
    return [explain(cluster, it, moved) for it in cluster.services() if it.namespace != "default"]


def cluster(*objects: object) -> Cluster:
    made = Cluster()
    for it in objects:
        made.apply(Updated(it))  # type: ignore[arg-type]
    return made


def web(*objects: object, **config: str) -> PortExplanation:
    """The one IPv4 port of ns/web among these objects, as node1 in zone-a serves it."""
    node = Node("node1", ("192.168.99.10",), zone="zone-a")
    its_terms = rule_context(load(None, config).config, node.name, node, KernelFacts(), Family.IPV4)
    made = cluster(*objects)
    found = made.service(Key("ns", "web"))
    assert found
    (port,) = explain(made, found, {Family.IPV4: its_terms}).ports
    return port


def test_slices_of_the_other_family() -> None:
    """They are passed over where the Service has no address of that family, and are not worth a word where it has."""
    six = slice_of("fd00::1", name="six")
    port = web(service(), slice_of("10.0.0.1"), six)
    assert [skip_message(it) for it in port.skipped] == []
    single = explain(
        cluster(service(), six),
        service(),
        dict.fromkeys(Family, port.context),
    )
    said = [skip_message(it) for it in single.ports[0].skipped]
    assert said == ["slice six: it is of the other address family"]


def test_passed_over() -> None:
    """Entries without an address, and ports without a name or number, are named by their slice."""
    port = web(service(), slice_of("10.0.0.1", endpoint(""), name="s1"))
    assert [skip_message(it) for it in port.skipped] == ["an endpoint in slice s1: it has no address"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "the configuration does not define pod traffic"),
        ({"cluster-cidr": "0.0.0.0/0"}, "every address counts as a pod's (0.0.0.0/0)"),
        ({"masquerade-all": "true"}, "every client's address is replaced"),
        (
            {"detect-local-mode": "BridgeInterface", "pod-bridge-interface": "cbr0"},
            "kept for traffic that comes in by cbr0",
        ),
    ],
)
def test_masquerading_in_words(config: dict[str, str], says: str) -> None:
    """Each way of telling pods' traffic has its sentence."""
    assert says in " ".join(notes(web(service(), slice_of("10.0.0.1"), **config)))


def test_external_ips_that_are_not_served() -> None:
    """With the feature gate off, external IPs are said not to be served."""
    config = load(None, {"feature-gates": "AllowServiceExternalIPs=false"}).config
    its_terms = rule_context(config, "node1", Node("node1"), KernelFacts(), Family.IPV4)
    made = service(external_ips=("192.0.2.1",))
    said = render_text.text([explain(cluster(made), made, {Family.IPV4: its_terms})], NodeTopology("node1"))
    assert "  Its external IP 192.0.2.1 is not served" in said


def test_what_is_not_there() -> None:
    """A Service or port that is not there is named with what there is; a Service without rules has its reason."""
    made = cluster(service(), service("none", headless=True, cluster_ips=()))
    its_terms = on("dual-stack")
    with pytest.raises(LookupError, match="there is no Service web2 in any namespace"):
        explain_all(made, parse_filter("web2"), its_terms)
    with pytest.raises(LookupError, match="there is no Service other/web"):
        explain_all(made, parse_filter("other/web"), its_terms)
    with pytest.raises(LookupError, match=r'Service ns/web has no port "https"; it has 80 \(http\)'):
        explain_all(made, parse_filter("ns/web:https"), its_terms)
    assert [it.name.port for it in explain_all(made, parse_filter("web:80"), its_terms)[0].ports] == ["http"]
    assert explain_all(made, parse_filter("none:80"), its_terms)[0].skipped


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        (FOLDER / f"{case}.txt").write_text(text(case))
    for case in DOCUMENTS:
        (FOLDER / f"{case}.json").write_text(document(case))
