"""Tables of nftables beside those of a service proxy: which of their rules packets to Services meet."""

import json

import pytest

from pykubeproxy.inspect.check.firewalls import firewalls
from pykubeproxy.inspect.check.report import Level
from pykubeproxy.inspect.node import NodeRules
from pykubeproxy.inspect.packets.packet import NodeNetwork, NodeRoute
from pykubeproxy.objects import Family
from pykubeproxy.rules.nft_list import Json, read_nft_lists
from pykubeproxy.rules.ruleset import Ruleset
from tests.cases import FIREWALLD, expected, load_case, nft_list

HOST = NodeNetwork(
    frozenset({"127.0.0.1", "169.254.1.1", "192.168.99.10"}),
    (NodeRoute("0.0.0.0/0", "eth0"), NodeRoute("10.244.1.0/24", "cni0")),
)
PLACE = {"family": "inet", "table": "fw"}
FROM_ETH0: Json = {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "eth0"}}
DNAT: Json = {"match": {"op": "in", "left": {"ct": {"key": "status"}}, "right": "dnat"}}
BLOCKED: Json = {
    "match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": {"prefix": {"addr": "64.0.0.0", "len": 2}}}
}  # fmt: skip
REJECTING = (
    "warn: chain ours of nftables table inet fw rejects packets to ns1/web:http:"
    ' iifname "eth0" tcp dport 8080 reject with tcp reset'
)
PORT: Json = {
    "match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": 8080}
}


def firewall(*rules: list[Json], hook: str = "forward", policy: str = "accept") -> str:
    base = {"type": "filter", "hook": hook, "prio": 10, "policy": policy}
    items = [
        {"chain": {**PLACE, "name": "ours", **base}},
        *({"rule": {**PLACE, "chain": "ours", "expr": rule}} for rule in rules),
    ]
    return json.dumps({"nftables": items})


def findings(listing: str, *, nftables_mode: bool = False) -> list[str]:
    """Check a firewall beside the rules of a case in a mode; return the levels and messages."""
    family = Family.IPV4
    texts = [listing, nft_list("nodeport")] if nftables_mode else [listing]
    saved = Ruleset(family, {}) if nftables_mode else expected(load_case("nodeport"), family)
    rules = NodeRules(saved, nftables=read_nft_lists(texts, "nft")[family])
    found = list(firewalls(family, rules, HOST))
    assert all((one.level is Level.WARN) is bool(one.advice) for one in found)
    return [f"{one.level.value}: {one.message}" for one in found]


@pytest.mark.parametrize("nftables_mode", [False, True])
@pytest.mark.parametrize(
    ("listing", "expected_finding"),
    [
        (FIREWALLD.read_text(), "ok: packets to Services pass nftables inet firewalld"),
        (firewall([DNAT, {"accept": None}], policy="drop"), "ok: packets to Services pass nftables inet fw"),
        (firewall([BLOCKED, {"drop": None}]), "ok: packets to Services pass nftables inet fw"),
        (
            firewall(hook="input", policy="drop"),
            "warn: chain ours of nftables table inet fw drops packets to default/kubernetes:https: policy DROP",
        ),
        (firewall(policy="drop"), "warn: chain ours of nftables table inet fw drops packets to ns1/web:http: policy DROP"),
        (
            firewall([FROM_ETH0, PORT, {"reject": {"type": "tcp reset"}}]),
            REJECTING,
        ),
    ],
    ids=["firewalld", "accepts translated", "blocks some clients", "for the node", "policy", "rule"],
)  # fmt: skip
def test_only_rules_that_services_meet_are_reported(
    listing: str, expected_finding: str, nftables_mode: bool
) -> None:
    assert expected_finding in findings(listing, nftables_mode=nftables_mode)


def test_nothing_is_said_without_other_tables() -> None:
    assert findings('{"nftables": []}', nftables_mode=True) == []
