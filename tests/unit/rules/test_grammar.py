"""Rules contain only a fixed vocabulary and validated values, also for corrupt and hostile objects."""

import ipaddress
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.objects import (
    Deleted,
    EndpointSlice,
    Family,
    Kind,
    Object,
    Service,
    Undecodable,
    Updated,
    decode,
)
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.render import render
from pykubeproxy.services.cluster import Cluster
from tests.fakes.synced import SyncedFamily, flags_context
from tests.grammar import rule_violation, violations
from tests.invalid_objects import SYNTAX, WHOLE, corrupted, odd
from tests.objects import slice_of

# Addresses in rules that no object contains.
FIXED = {"127.0.0.0/8", "10.244.0.0/16", "fd00:10:244::/56", "::1/128"}
_SOURCE_OR_DESTINATION = re.compile(r"-[sd] (\S+)")
_TARGET = re.compile(r"--to-destination \[?([^]\s]+?)\]?:\d+$")


def context(family: Family, dispatch: str) -> RuleContext:
    return flags_context(family, cluster_cidr="10.244.0.0/16,fd00:10:244::/56", dispatch=dispatch)


def decoded(kind: Kind, raw: bytes) -> list[Object]:
    try:
        return [decode(kind, raw)]
    except Undecodable:
        return []


corrupt_objects = st.sampled_from([Kind.SERVICE, Kind.ENDPOINT_SLICE]).flatmap(
    lambda kind: st.one_of(odd(kind), odd(kind), corrupted(kind)).map(lambda raw: (kind, raw))
)
VALID = [decode(kind, json.dumps(WHOLE[kind]).encode()) for kind in (Kind.SERVICE, Kind.ENDPOINT_SLICE)]


@settings(max_examples=200)
@given(
    st.lists(corrupt_objects, min_size=1, max_size=5),
    st.sampled_from(Family),
    st.sampled_from(["flat", "tree"]),
)
def test_every_line_matches_the_grammar(
    corrupt: list[tuple[Kind, bytes]], family: Family, dispatch: str
) -> None:
    """Holds for full and partial syncs while corrupt objects come and go."""
    node = SyncedFamily(context=context(family, dispatch))
    texts = node.live.texts
    objects = VALID + [it for kind, raw in corrupt for it in decoded(kind, raw)]
    for it in objects:
        node.sync(Updated(it))
    allowed = FIXED | {address for it in objects for address in addresses(it)}
    for text in texts:
        assert violations(text) == []
        assert addresses_in(text) <= allowed
    for it in objects:
        node.sync(Deleted(Kind(type(it).__name__), it.key))
    assert [violations(text) for text in texts] == [[]] * len(texts)


def addresses(object_: Object) -> set[str]:
    """The addresses of an object as networks."""
    match object_:
        case Service():
            hosts = (*object_.cluster_ips, *object_.external_ips, *object_.load_balancer_ips)
            return {*map(as_network, hosts), *object_.source_ranges}
        case EndpointSlice():
            return {as_network(it.address) for it in object_.endpoints if it.address}
    return set()


def addresses_in(text: str) -> set[str]:
    """Return the addresses in rules, except those of dispatch branches."""
    lines = [line for line in text.splitlines() if "-j KUBE-SVC-" not in line or "cluster IP" in line]
    return {
        as_network(address)
        for line in lines
        for pattern in (_SOURCE_OR_DESTINATION, _TARGET)
        for address in pattern.findall(line)
    }


def as_network(text: str) -> str:
    return str(ipaddress.ip_network(text))


@pytest.mark.parametrize(
    "rule",
    [
        '-m comment --comment "ns/web" -j ACCEPT -j DROP; reboot',
        "-s 10.0.0.1/32 -j LOG",
        "-s 10.0.0.1 -j ACCEPT",
        "-s 10.0.0.1/8 -j ACCEPT",
        "--dport 0x50 -j ACCEPT",
        "--dport 65536 -j ACCEPT",
        "! -j ACCEPT",
        '-m comment --comment "a" b" -j ACCEPT',
        '-m comment --comment "ns/web \\" -j ACCEPT',
        "-m comment --comment ns/web -j ACCEPT",
        "-j DNAT --to-destination fd00::1:80",
        "-j KUBE-SVC-SHORT",
        "-j  ACCEPT",
        "-j",
    ],
)
def test_grammar_rejects_other_lines(rule: str) -> None:
    """The grammar itself rejects other lines."""
    assert rule_violation(rule)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("text", SYNTAX)
@pytest.mark.parametrize("place", ["name", "namespace", "port", "range", "ip"])
def test_syntax_never_becomes_part_of_a_rule(family: Family, place: str, text: str) -> None:
    """Quotes, line breaks and options in any field are data or rejected."""
    whole = json.loads(json.dumps(WHOLE[Kind.SERVICE]))
    match place:
        case "name" | "namespace":
            whole["metadata"][place] = text
        case "port":
            whole["spec"]["ports"][0]["name"] = text
        case "range":
            whole["spec"]["loadBalancerSourceRanges"] = [text]
        case "ip":
            whole["spec"]["externalIPs"] = [text]
    cluster = Cluster()
    cluster.apply(Updated(slice_of("10.244.1.5")))
    try:
        cluster.apply(Updated(decode(Kind.SERVICE, json.dumps(whole).encode())))
    except Undecodable as error:
        assert str(error).isprintable()
    for rules in render(cluster, context(family, "auto")).chains.values():
        for rule in rules:
            assert rule.isascii()
            assert rule.isprintable()
            assert rule.count('"') in (0, 2)
            assert "reboot" not in rule
