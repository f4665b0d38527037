"""Dispatch trees in table filter: they reject the same packets as flat chains, and syncs keep them in line."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.config import Dispatch
from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Deleted, Family, Key, Kind, Port, Protocol, Updated
from pykubeproxy.rules.dispatch import shared_chain
from pykubeproxy.rules.ownership import is_ours, is_owned
from pykubeproxy.rules.removal import removal
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.skeleton import FILTER_EXTERNAL, SHARED
from pykubeproxy.rules.text import Chain, host, rule, write_chains
from tests.fakes.drift import scope
from tests.fakes.iptables import FakeIptables
from tests.fakes.synced import SyncedFamily, flags_context
from tests.objects import service
from tests.packet_model import Packet, Walker

pytestmark = pytest.mark.usefixtures("small_trees")

ADDRESSES = st.sampled_from(["10.96.0.1", "10.96.0.2", "10.111.7.9", "192.0.2.1", "fd00:96::1", "fd00:96::2"])
PORTS = st.one_of(st.integers(1, 40), st.sampled_from([30000, 30001, 40000, 65535]))
PROTOCOLS = st.sampled_from(["tcp", "udp", "sctp"])


@st.composite
def filter_entries(draw: st.DrawFn, ipv6: bool) -> tuple[str, ...]:
    """Rules that reject or drop at an address and port, at an address, or at a node port; some for the same packets."""
    rules = []
    destinations = st.tuples(ADDRESSES.filter(lambda it: (":" in it) == ipv6), PROTOCOLS, PORTS)
    for number, (address, protocol, port) in enumerate(draw(st.lists(destinations, max_size=60))):
        target = draw(st.sampled_from(["REJECT", "DROP", "ACCEPT"]))
        matches, at, comment = (
            f"-m {protocol} --dport {port}",
            host(address),
            f"ns/s{number}:p has no endpoints",
        )
        match draw(st.sampled_from(["port", "port", "port", "address", "node port"])):
            case "address":
                rules.append(rule(destination=at, comment=comment, target=target))
            case "port":
                rules.append(rule(matches, destination=at, protocol=protocol, comment=comment, target=target))
            case _:
                local = "-m addrtype --dst-type LOCAL"
                rules.append(rule(local, matches, protocol=protocol, comment=comment, target=target))
    return tuple(rules)


@settings(max_examples=150, deadline=None)
@given(st.booleans().flatmap(lambda ipv6: st.tuples(st.just(ipv6), filter_entries(ipv6))), st.data())
def test_a_tree_in_table_filter_rejects_the_same_packets(
    made: tuple[bool, tuple[str, ...]], data: st.DataObject
) -> None:
    """A packet to another port of an address is not rejected. Rules for addresses go before those for node ports."""
    (ipv6, rules), key = made, FILTER_EXTERNAL
    # The rule for all ports of an address, that of its only Service, goes first.
    flat = sorted(rules, key=lambda text: (not text.startswith("-d "), "--dport" in text))
    tree = shared_chain(key, [((key, rules),)], (), Dispatch.TREE)
    names = [name for name, _ in tree.chains]
    assert len(set(names)) == len(names)
    branches = {ChainKey("filter", name): texts for name, texts in tree.chains}
    family = Family.IPV6 if ipv6 else Family.IPV4
    walkers = [
        Walker(Ruleset(family, chains)) for chains in ({key: tuple(flat)}, {**branches, key: tree.root})
    ]
    address = data.draw(ADDRESSES.filter(lambda it: (":" in it) == ipv6))
    source = "2001:db8::9" if ipv6 else "192.0.2.9"
    for local in (False, True):
        packet = Packet(source, address, data.draw(PROTOCOLS), data.draw(PORTS), local_destination=local)
        expected, found = (walker.walk(packet, *key) for walker in walkers)
        assert found == expected


def without_endpoints(
    number: int, backend: Backend = Backend.NFT, chains_per_block: int | None = 200
) -> SyncedFamily:
    """Return tables with a tree for Services with external IPs and node ports, and no endpoints."""
    node = SyncedFamily(
        context=flags_context(dispatch="tree"), backend=backend, chains_per_block=chains_per_block
    )
    for n in range(1, number + 1):
        ports = tuple(Port(f"p{p}", Protocol.TCP, p, 30000 + 10 * n + p) for p in range(1, 4))
        made = service(f"s{n}", cluster_ip=f"10.96.{n}.1", ports=ports, external_ips=(f"192.0.2.{n}",))
        node.apply(Updated(made))
    node.sync()
    return node


def filter_branches(live: FakeIptables) -> set[str]:
    return {key.chain for key in live.save().chains if key.table == "filter" and is_owned(key)}


@pytest.mark.parametrize("chains_per_block", [None, 1, 200])
def test_branches_that_kube_proxy_left_are_used_again_or_removed(chains_per_block: int | None) -> None:
    """In table filter, kube-proxy flushes and deletes only the chains that it knows."""
    node = without_endpoints(4, chains_per_block=chains_per_block)
    tree, flat = node.context, flags_context(dispatch="flat")
    left = filter_branches(node.live)
    assert len(left) > 10
    node.apply(Deleted(Kind.SERVICE, Key("ns", "s4")))
    as_kube_proxy = render(node.cluster, flat)
    node.live.restore(
        "*filter\n" + write_chains([Chain(key, as_kube_proxy.chains[key]) for key in SHARED[:4]]) + "COMMIT\n"
    )
    assert filter_branches(node.live) == left
    assert is_ours(ChainKey("filter", min(left)))
    for node.context in (tree, flat):
        node.restart()
        node.sync()
        fresh = node.fresh()
        fresh.sync()
        assert node.chains() == fresh.chains()


@pytest.mark.parametrize("backend", Backend)
def test_cleanup_removes_branches_that_kube_proxy_left(backend: Backend) -> None:
    live = without_endpoints(4, backend).live
    live.restore("*filter\n:KUBE-SERVICES - [0:0]\n:KUBE-EXTERNAL-SERVICES - [0:0]\nCOMMIT\n")
    assert filter_branches(live)
    live.restore(removal(live.save()).restore_input(5 if backend is Backend.NFT else None))
    assert filter_branches(live) == set()
    assert not any(key.chain.startswith("KUBE-SERVICES") for key in live.save().chains)


def test_a_branch_that_a_foreign_rule_refers_to_is_emptied_and_kept() -> None:
    """The kernel deletes no such chain; nor is it drift."""
    node = without_endpoints(4)
    branches = filter_branches(node.live)
    jumps = "".join(f"-A FORWARD -j {name}\n" for name in branches)
    node.live.restore(f"*filter\n{jumps}COMMIT\n")
    node.apply(*(Deleted(Kind.SERVICE, Key("ns", f"s{n}")) for n in range(1, 5)))
    node.restart()
    assert node.sync().wrote
    assert {node.chains()[ChainKey("filter", name)] for name in branches} == {()}
    assert not node.tables.note_drift(scope())
    node.tables.distrust()
    assert not node.sync().wrote


@pytest.mark.parametrize("limit", [2, 6])
def test_branches_are_written_and_deleted_in_small_blocks(limit: int) -> None:
    """Each branch before those that jump to it: the time of a block grows with the square of its chains."""
    node = without_endpoints(8, chains_per_block=limit)
    assert len(filter_branches(node.live)) > 3 * limit
    deleted = node.sync(*(Deleted(Kind.SERVICE, Key("ns", f"s{n}")) for n in range(1, 9)))
    assert not deleted.rejected_tree
    assert deleted.chains_deleted > 3 * limit
    for text in "".join(node.live.texts).split("COMMIT\n"):
        if not text.startswith("*filter"):
            continue
        assert len(set(re.findall(r"^(?::|-X )(\S+)", text, re.MULTILINE))) <= 2 * limit
