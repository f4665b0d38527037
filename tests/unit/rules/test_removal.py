"""What cleanup removes from the tables, and what it keeps."""

import pytest

from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Family
from pykubeproxy.rules.removal import Removal, kubelet_guards_loopback, removal
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.skeleton import LOOPBACK_GUARD
from tests.cases import NAMES, expected, load_case
from tests.fakes import kube_proxy
from tests.fakes.iptables import FakeIptables

FOREIGN = """\
*mangle
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.17.0.0/16 -j MASQUERADE
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
:MINE - [0:0]
-A INPUT -j MINE
-A INPUT -j KUBE-FIREWALL
-A FORWARD -j ACCEPT
-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
COMMIT
"""
FIREWALL = ChainKey("filter", "KUBE-FIREWALL")
HINT = "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n"


def as_input(ruleset: Ruleset) -> str:
    """Return restore input that adds a Ruleset to tables, with its jumps and chains."""
    lines = []
    for table in ruleset.tables():
        chains = list(ruleset.of_table(table))
        lines += [f"*{table}", *(f":{name} - [0:0]" for name, _ in chains)]
        lines += [f"-A {name} {rule}" for name, rules in chains for rule in rules]
        lines.append("COMMIT")
    return "".join(f"{line}\n" for line in lines)


def programmed(name: str, backend: Backend, family: Family) -> tuple[FakeIptables, Ruleset]:
    """Return tables with foreign rules and the rules of one case, and the tables before the latter."""
    tables = FakeIptables(backend, family)
    tables.counters = {"ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts"}
    tables.restore(FOREIGN)
    tables.restore("*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n")
    before = tables.save()
    text = as_input(expected(load_case(name), family))
    # The kubelet's chain and jumps are there already.
    tables.restore("".join(line for line in text.splitlines(True) if "KUBE-FIREWALL" not in line))
    return tables, before


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("name", [name for name in NAMES if "random" not in name])
def test_only_foreign_rules_remain(name: str, backend: Backend) -> None:
    """After removal of kube-proxy's rules the tables are as before, for each recorded case."""
    for family in Family:
        tables, before = programmed(name, backend, family)
        what = removal(tables.save())
        tables.restore(what.restore_input(20 if backend is Backend.NFT else None))
        left = dict(before.chains)
        del left[ChainKey("mangle", "KUBE-PROXY-CANARY")]
        assert tables.save().chains == left
        assert removal(tables.save()) == Removal()


def test_blocks_are_small() -> None:
    """No block exceeds the chain limit; legacy uses one block a table."""
    tables, _ = programmed("multi-port", Backend.NFT, Family.IPV4)
    what = removal(tables.save())
    blocks = what.restore_input(4).split("COMMIT\n")[:-1]
    assert max(sum(line[0] in ":X" or line[:2] == "-X" for line in b.splitlines()) for b in blocks) == 4
    assert what.restore_input(None).count("COMMIT\n") == 3


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("limit", [1, None])
def test_chain_that_foreign_rules_refer_to(backend: Backend, limit: int | None) -> None:
    """The chain is emptied and kept with the foreign rules; a second removal is empty."""
    tables, _ = programmed("clusterip-one", backend, Family.IPV4)
    tables.restore(
        "*nat\n:CNI - [0:0]\n-A CNI -s 10.0.0.1/32 -j KUBE-MARK-MASQ\n"
        '-A OUTPUT -m comment --comment "my own" -j KUBE-SERVICES\nCOMMIT\n'
    )
    what = removal(tables.save())
    kept = (ChainKey("nat", "KUBE-MARK-MASQ"), ChainKey("nat", "KUBE-SERVICES"))
    assert set(what.kept) == set(what.emptied) == set(kept)
    tables.restore(what.restore_input(limit))
    left = tables.save().chains
    assert left[ChainKey("nat", "CNI")] == ("-s 10.0.0.1/32 -j KUBE-MARK-MASQ",)
    assert left[ChainKey("nat", "OUTPUT")] == ('-m comment --comment "my own" -j KUBE-SERVICES',)
    assert [left[key] for key in kept] == [(), ()]
    again = removal(tables.save())
    assert not again.restore_input(None)
    assert set(again.kept) == set(kept)


def test_jumps_of_older_versions() -> None:
    """Jumps of older versions are recognised by comment and removed, also duplicates."""
    old = '-m comment --comment "kubernetes service portals" -j KUBE-SERVICES'
    tables = FakeIptables()
    tables.restore(
        f"*filter\n:KUBE-SERVICES - [0:0]\n-A INPUT {old}\n-A INPUT -j ACCEPT\n-A INPUT {old}\nCOMMIT\n"
    )
    tables.restore(removal(tables.save()).restore_input(None))
    assert {key.chain: rules for key, rules in tables.save().chains.items()} == {
        "INPUT": ("-j ACCEPT",),
        "FORWARD": (),
        "OUTPUT": (),
    }


def firewall(*rules: str, jumps: str = "", family: Family = Family.IPV4) -> FakeIptables:
    """Return tables with KUBE-FIREWALL as the kubelet and the proxies write it, with these rules."""
    tables = FakeIptables(family=family)
    lines = ["-A INPUT -j KUBE-FIREWALL", "-A OUTPUT -j KUBE-FIREWALL", *jumps.splitlines()]
    lines += [f"-A KUBE-FIREWALL {rule}" for rule in rules]
    tables.restore("\n".join(("*filter", ":KUBE-FIREWALL - [0:0]", *lines, "COMMIT\n")))
    return tables


def test_a_firewall_chain_of_the_proxy_is_removed() -> None:
    """With its jumps, if other rules guard loopback addresses."""
    tables = firewall(LOOPBACK_GUARD)
    tables.restore(removal(tables.save(), loopback_guarded=True).restore_input(None))
    assert set(tables.save().chains.values()) == {()}
    assert FIREWALL not in tables.save().chains


def test_a_firewall_chain_stays_while_only_it_guards_loopback_addresses() -> None:
    """The removal says so. Without its rule, the chain guards nothing."""
    found = removal(firewall(LOOPBACK_GUARD).save())
    assert found == Removal(guard_stays=True)
    assert removal(firewall(family=Family.IPV6).save()).deleted == (FIREWALL,)


@pytest.mark.parametrize("hint", ["KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"])
def test_the_kubelets_firewall_chain_stays(hint: str) -> None:
    """The kubelet's rules are those of the proxy; its hint chains tell that it wrote them."""
    tables = firewall(LOOPBACK_GUARD)
    tables.restore(f"*mangle\n:{hint} - [0:0]\nCOMMIT\n")
    assert removal(tables.save(), loopback_guarded=True) == Removal()
    assert kubelet_guards_loopback(tables.save())


@pytest.mark.parametrize(
    ("rules", "jumps"),
    [
        ((LOOPBACK_GUARD, "-m mark --mark 0x8000/0x8000 -j DROP"), ""),
        (("-m mark --mark 0x8000/0x8000 -j DROP",), ""),
        ((LOOPBACK_GUARD,), "-A FORWARD -j KUBE-FIREWALL"),
        ((), "-A INPUT -i eth0 -j KUBE-FIREWALL"),
    ],
)
def test_a_firewall_chain_that_others_use_stays(rules: tuple[str, ...], jumps: str) -> None:
    found = removal(firewall(*rules, jumps=jumps).save(), loopback_guarded=True)
    assert (found.jumps, found.deleted, found.emptied) == ((), (), ())


def test_only_a_complete_guard_of_the_kubelet_counts() -> None:
    """Hint chain, rule, and jump."""
    assert not kubelet_guards_loopback(firewall(LOOPBACK_GUARD).save())
    tables = firewall()
    tables.restore(HINT)
    assert not kubelet_guards_loopback(tables.save())
    tables = firewall(LOOPBACK_GUARD)
    tables.restore(f"{HINT}*filter\n-D INPUT -j KUBE-FIREWALL\nCOMMIT\n")
    assert not kubelet_guards_loopback(tables.save())


def test_rules_of_ipvs_mode_are_removed_on_request() -> None:
    """Otherwise they stay, with the chains that they refer to."""
    tables = FakeIptables()
    tables.restore(FOREIGN)
    before = tables.save()
    tables.restore(kube_proxy.RULES)
    found = removal(tables.save())
    assert ChainKey("nat", "KUBE-MARK-MASQ") in found.kept
    assert ChainKey("nat", "KUBE-LOAD-BALANCER") not in (*found.kept, *found.deleted)
    tables.restore(removal(tables.save(), all_modes=True).restore_input(3))
    assert tables.save().chains == before.chains


def test_nothing_to_remove() -> None:
    """Without rules of ours there is no input."""
    tables = FakeIptables()
    tables.restore(FOREIGN)
    assert removal(tables.save()).restore_input(10) == ""
