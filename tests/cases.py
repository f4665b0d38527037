"""The conformance cases: objects, configuration, and what kube-proxy 1.36 programmed for them."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from pykubeproxy.config import Config, load
from pykubeproxy.inspect.packets.packet import NodeNetwork, NodeRoute
from pykubeproxy.objects import Family, Kind, Listed, Node, decode
from pykubeproxy.rules.iptables_save import parse
from pykubeproxy.rules.nft_list import NftRuleset, read_nft_lists
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.cluster import Cluster

FOLDER = Path(__file__).parent / "data" / "conformance" / "cases"
# What kube-proxy programmed in nftables mode, as `nft -j list table` prints it for each family.
NFT_FOLDER = Path(__file__).parent / "data" / "nftables"
# What firewalld 1.3.3 programs by default, as `nft -j list ruleset` prints it.
FIREWALLD = NFT_FOLDER.parent / "firewalld.json"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
# What the recorded node's interfaces had.
ADDRESSES = ("127.0.0.1", "192.168.99.10", "10.244.1.1", "::1", "fd00:99::10")
NETWORK = NodeNetwork(
    frozenset(ADDRESSES),
    (
        NodeRoute("0.0.0.0/0", "eth0"),
        NodeRoute("10.244.1.0/24", "cni0"),
        NodeRoute("::/0", "eth0"),
        NodeRoute("fd00:10:244:1::/64", "cni0"),
    ),
)

# kube-proxy fills these in no particular order, save that the node-port jumps come last.
UNORDERED = {
    *(
        ChainKey("filter", f"KUBE-{it}")
        for it in ("SERVICES", "EXTERNAL-SERVICES", "NODEPORTS", "PROXY-FIREWALL")
    ),
    *(ChainKey("nat", f"KUBE-{it}") for it in ("SERVICES", "NODEPORTS")),
}
LAST = "NOTE: this must be the last rule in this chain"


@cache
def load_case(name: str) -> dict[str, Any]:
    """One case, as its file has it."""
    case: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return case


def config_of(case: dict[str, Any]) -> Config:
    return load(case["config"], {}).config


def node_of(case: dict[str, Any]) -> Node:
    node = decode(Kind.NODE, json.dumps(case["node"]).encode())
    assert isinstance(node, Node)
    return node


def cluster_of(case: dict[str, Any]) -> Cluster:
    """The objects of a case, all listed."""
    cluster = Cluster()
    objects = [*case["objects"], case["node"]]
    for kind in Kind:
        of_kind = [it for it in objects if it["kind"] == kind.value]
        cluster.apply(Listed(kind, tuple(decode(kind, json.dumps(it).encode()) for it in of_kind)))
    return cluster


def expected(case: dict[str, Any], family: Family) -> Ruleset:
    """What kube-proxy had programmed."""
    return parse(family, "\n".join(case["expected"][family.value.lower()]))


def nft_list(name: str) -> str:
    """Return what `nft -j list ruleset` prints on the node of a case in nftables mode."""
    tables: dict[str, dict[str, list[object]]] = json.loads((NFT_FOLDER / f"{name}.json").read_text())
    return json.dumps({"nftables": [it for table in tables.values() if table for it in table["nftables"]]})


@cache
def nft_tables(name: str, family: Family) -> NftRuleset:
    """Return what kube-proxy had programmed in nftables mode."""
    return read_nft_lists([nft_list(name)], name)[family]


def as_restore_input(case: str, family: Family, *, jumps: bool = True, packets: int = 0) -> str:
    """kube-proxy's rules of a case as input for iptables-restore --noflush; they do without the nfacct counters.

    Without `jumps` the built-in chains are left alone. Each DNAT rule has already seen some `packets` of 60 bytes.
    """
    lines = []
    ruleset = expected(load_case(case), family)
    for table in ruleset.tables():
        chains = [
            (name, rules) for name, rules in ruleset.of_table(table) if jumps or name.startswith("KUBE-")
        ]
        lines += [f"*{table}", *(f":{name} - [0:0]" for name, _ in chains if name.startswith("KUBE-"))]
        counted = f"[{packets}:{packets * 60}] " if packets else ""
        lines += [
            f"{counted if ' DNAT ' in rule else ''}-A {name} {rule}"
            for name, rules in chains
            for rule in rules
        ]
        lines.append("COMMIT")
    text = "".join(f"{line}\n" for line in lines)
    return re.sub(r" -m nfacct --nfacct-name +\S+", "", text)


def comparable(ruleset: Ruleset) -> dict[ChainKey, list[str]]:
    """Chains of filter and nat in a form in which two proxies' rules can be compared.

    Built-in chains without rules are left out. In chains without a fixed order rules are sorted; that the node-port
    jumps come last, and a rule for 127/8 before its general one, is checked before.
    """
    chains = {
        key: [re.sub(r"\s+", " ", rule) for rule in rules]
        for key, rules in ruleset.chains.items()
        if key.table in ("filter", "nat") and (rules or key.chain.startswith("KUBE-"))
    }
    for key in UNORDERED & chains.keys():
        rules = chains[key]
        jumps = [rule for rule in rules if LAST in rule]
        assert rules[len(rules) - len(jumps) :] == jumps, f"node-port jumps are not last in {key}"
        _check_loopback_first(rules)
        chains[key] = sorted(rules)
    return chains


def _check_loopback_first(rules: list[str]) -> None:
    for i, rule in enumerate(rules):
        if rule.startswith("-d 127.0.0.0/8 "):
            general = re.sub(r" -m nfacct --nfacct-name \S+", "", rule.removeprefix("-d 127.0.0.0/8 "))
            assert general not in rules[:i], f"the rule for 127/8 comes after its general one: {rule}"


def saved_text(name: str, family: Family) -> str:
    """Return the output of iptables-save on the node of a case, save that the recording has no table mangle."""
    program = "iptables-save" if family is Family.IPV4 else "ip6tables-save"
    header = f"# Generated by {program} v1.8.9 (nf_tables) on Sun"
    canary = "*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT"
    rules = "\n".join(load_case(name)["expected"][family.value.lower()])
    return f"{header}\n{canary}\n{rules}\n# Completed on Sun\n"
