"""Name services without relying on every comment."""

import re

import pytest

from pykubeproxy.inspect.dump.model import views
from pykubeproxy.inspect.targets import ServiceFilter, parse_filter
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.ports import PortName
from tests.cases import expected, load_case


def without_comments(ruleset: Ruleset, pattern: str) -> Ruleset:
    """Return the same rules; those that match lose their comments."""

    def strip(text: str) -> str:
        return re.sub(r'-m comment --comment "[^"]*" ?', "", text).strip()

    chains = {
        key: tuple(
            strip(rule) if re.search(pattern, f"{key.table} {key.chain} {rule}") else rule for rule in rules
        )
        for key, rules in ruleset.chains.items()
    }
    return Ruleset(ruleset.family, chains)


def names(ruleset: Ruleset, service_filter: ServiceFilter | None = None) -> set[str]:
    return {str(view.name) for view in views(ruleset, {}, service_filter)}


WEB = {"default/kubernetes:https", "ns1/web:http"}


def test_large_clusters_are_named() -> None:
    """kube-proxy omits comments in their balancing and endpoint rules."""
    found = views(expected(load_case("large-cluster"), Family.IPV4), {})
    assert len(found) == 12
    for view in found:
        assert sum(endpoint.share for endpoint in view.endpoints) == pytest.approx(1)


def test_the_masquerading_rule_names_a_service() -> None:
    """The dispatch rule may have no comment."""
    ruleset = expected(load_case("clusterip-three"), Family.IPV4)
    assert names(without_comments(ruleset, "^nat KUBE-(SERVICES|SEP)")) == WEB
    assert names(without_comments(ruleset, "^nat KUBE-(SERVICES|SEP)|statistic|-j KUBE-SEP")) == WEB


def test_a_comment_elsewhere_names_a_service_by_hash() -> None:
    """The name in the comment yields the name of the chain."""
    ruleset = expected(load_case("lb-source-ranges"), Family.IPV4)
    uncommented = without_comments(ruleset, "^nat KUBE-(SERVICES|NODEPORTS|SEP|SVC|EXT|FW)")
    # Only the filter rule for excluded sources still has the name.
    assert "ns1/web:http" in names(uncommented)
    assert len(names(uncommented)) == 2


def test_the_requested_name_is_found_by_hash() -> None:
    """No other service matches."""
    uncommented = without_comments(expected(load_case("multi-port"), Family.IPV4), "")
    assert names(uncommented, parse_filter("ns1/web:http")) == {"ns1/web:http"}
    assert names(uncommented, parse_filter("ns1/other:http")) == set()


def test_an_unnamed_service_has_the_name_of_its_chain() -> None:
    uncommented = without_comments(expected(load_case("clusterip-one"), Family.IPV4), "")
    assert PortName("", "KUBE-SVC-4LVCYZMTA5CQO6SX", "", "TCP") in {
        view.name for view in views(uncommented, {})
    }


@pytest.mark.parametrize(
    ("text", "namespace", "service_filter"),
    [
        ("", "", ServiceFilter()),
        ("", "ns1", ServiceFilter("ns1")),
        ("web", "", ServiceFilter("", "web")),
        ("web", "ns1", ServiceFilter("ns1", "web")),
        ("web:http", "", ServiceFilter("", "web", "http")),
        ("ns1/web", "", ServiceFilter("ns1", "web")),
        ("ns1/web", "ns1", ServiceFilter("ns1", "web")),
        ("ns1/web:80", "", ServiceFilter("ns1", "web", "80")),
        ("svc/web", "", ServiceFilter("", "web")),
        ("svc/web:http", "ns1", ServiceFilter("ns1", "web", "http")),
        ("service/ns1/web", "", ServiceFilter("ns1", "web")),
        ("web.ns1:80", "", ServiceFilter("ns1", "web", "80")),
        ("web.ns1.svc.cluster.local", "ns1", ServiceFilter("ns1", "web")),
    ],
)
def test_filters_are_parsed(text: str, namespace: str, service_filter: ServiceFilter) -> None:
    assert parse_filter(text, namespace) == service_filter


@pytest.mark.parametrize(
    ("text", "namespace"),
    [
        ("a/b/c", ""),
        ("/web", ""),
        ("ns1/", ""),
        ("web:", ""),
        (":http", ""),
        ("a/web", "b"),
        ("svc/a/web", "b"),
        ("web.a", "b"),
        ("svc/", ""),
        ("a.b.c", ""),
    ],
)
def test_invalid_filters_are_rejected(text: str, namespace: str) -> None:
    """Also a namespace that contradicts the option."""
    with pytest.raises(ValueError, match=f'"{text}"'):
        parse_filter(text, namespace)


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("web", {"http", "https"}),
        ("web:https", {"https"}),
        ("web:443", {"https"}),
        ("web:8443", set()),
        ("we", set()),
    ],
)
def test_ports_are_selected_by_name_or_number(text: str, ports: set[str]) -> None:
    """A service needs its full name."""
    ruleset = expected(load_case("multi-port"), Family.IPV4)
    assert {view.name.port for view in views(ruleset, {}, parse_filter(text))} == ports
    assert views(ruleset, {}, parse_filter(text, "elsewhere")) == ()


def test_a_comment_about_another_service_is_ignored() -> None:
    """Its name does not yield the name of the chain."""
    ruleset = without_comments(expected(load_case("clusterip-one"), Family.IPV4), "^nat KUBE-SERVICES")
    balancing = ChainKey("nat", "KUBE-SVC-4LVCYZMTA5CQO6SX")
    misleading = '-m comment --comment "ns1/other:http -> 10.244.1.11:8080" -j KUBE-SEP-LXRUOG7B5IJ5LW4S'
    assert names(Ruleset(Family.IPV4, {**ruleset.chains, balancing: (misleading,)})) == WEB
