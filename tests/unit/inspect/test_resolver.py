"""Services are named although comments are missing."""

import re

import pytest

from pykubeproxy.inspect.dump.model import views
from pykubeproxy.inspect.filter import ServiceFilter, parse_filter
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.ports import PortName
from tests.cases import expected, load_case


def without_comments(ruleset: Ruleset, pattern: str) -> Ruleset:
    """The same rules; those that match have lost their comment."""

    def strip(text: str) -> str:
        return re.sub(r'-m comment --comment "[^"]*" ?', "", text).strip()

    chains = {
        key: tuple(
            strip(rule) if re.search(pattern, f"{key.table} {key.chain} {rule}") else rule for rule in rules
        )
        for key, rules in ruleset.chains.items()
    }
    return Ruleset(ruleset.family, chains)


def names(ruleset: Ruleset, wanted: ServiceFilter | None = None) -> set[str]:
    return {str(view.name) for view in views(ruleset, {}, wanted)}


WEB = {"default/kubernetes:https", "ns1/web:http"}


def test_large_cluster() -> None:
    """kube-proxy's large clusters, where balancing and endpoint rules bear no comments, are named and shared out."""
    found = views(expected(load_case("large-cluster"), Family.IPV4), {})
    assert len(found) == 12
    for view in found:
        assert sum(endpoint.share for endpoint in view.endpoints) == pytest.approx(1)


def test_by_the_masquerading_rule() -> None:
    """A service whose dispatch bears no comment is named by its chains' comments."""
    ruleset = expected(load_case("clusterip-three"), Family.IPV4)
    assert names(without_comments(ruleset, "^nat KUBE-(SERVICES|SEP)")) == WEB
    assert names(without_comments(ruleset, "^nat KUBE-(SERVICES|SEP)|statistic|-j KUBE-SEP")) == WEB


def test_by_hash_from_another_rule() -> None:
    """One whose chains bear none at all is named by a comment elsewhere that yields its chain's name."""
    ruleset = expected(load_case("lb-source-ranges"), Family.IPV4)
    bare = without_comments(ruleset, "^nat KUBE-(SERVICES|NODEPORTS|SEP|SVC|EXT|FW)")
    # Only filter's rule for refused sources still has the name.
    assert "ns1/web:http" in names(bare)
    assert len(names(bare)) == 2


def test_by_hash_from_what_is_asked_for() -> None:
    """Without any comment at all the name that is asked for is recognised, and no other service is taken for it."""
    bare = without_comments(expected(load_case("multi-port"), Family.IPV4), "")
    assert names(bare, parse_filter("ns1/web:http")) == {"ns1/web:http"}
    assert names(bare, parse_filter("ns1/other:http")) == set()


def test_unknown() -> None:
    """A service that nothing names is shown under its chain's name."""
    bare = without_comments(expected(load_case("clusterip-one"), Family.IPV4), "")
    assert PortName("", "KUBE-SVC-4LVCYZMTA5CQO6SX", "", "TCP") in {view.name for view in views(bare, {})}


@pytest.mark.parametrize(
    ("text", "namespace", "wanted"),
    [
        ("", "", ServiceFilter()),
        ("", "ns1", ServiceFilter("ns1")),
        ("web", "", ServiceFilter("", "web")),
        ("web", "ns1", ServiceFilter("ns1", "web")),
        ("web:http", "", ServiceFilter("", "web", "http")),
        ("ns1/web", "", ServiceFilter("ns1", "web")),
        ("ns1/web", "ns1", ServiceFilter("ns1", "web")),
        ("ns1/web:80", "", ServiceFilter("ns1", "web", "80")),
    ],
)
def test_what_is_asked_for(text: str, namespace: str, wanted: ServiceFilter) -> None:
    """The forms in which a service can be asked for."""
    assert parse_filter(text, namespace) == wanted


@pytest.mark.parametrize(
    ("text", "namespace"),
    [("a/b/c", ""), ("/web", ""), ("ns1/", ""), ("web:", ""), (":http", ""), ("a/web", "b")],
)
def test_what_cannot_be_meant(text: str, namespace: str) -> None:
    """Other forms, and a namespace that contradicts the option, are refused."""
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
def test_selecting(text: str, ports: set[str]) -> None:
    """A service is found by its full name, a port by its name or by the number at which it is reached."""
    ruleset = expected(load_case("multi-port"), Family.IPV4)
    assert {view.name.port for view in views(ruleset, {}, parse_filter(text))} == ports
    assert views(ruleset, {}, parse_filter(text, "elsewhere")) == ()


def test_a_comment_about_another_service() -> None:
    """A name in a comment counts only if it yields the chain's name."""
    ruleset = without_comments(expected(load_case("clusterip-one"), Family.IPV4), "^nat KUBE-SERVICES")
    balancing = ChainKey("nat", "KUBE-SVC-4LVCYZMTA5CQO6SX")
    misleading = '-m comment --comment "ns1/other:http -> 10.244.1.11:8080" -j KUBE-SEP-LXRUOG7B5IJ5LW4S'
    assert names(Ruleset(Family.IPV4, {**ruleset.chains, balancing: (misleading,)})) == WEB
