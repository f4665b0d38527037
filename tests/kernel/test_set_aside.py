"""Services whose rules are refused are set aside, and all others served: in both backends, and with the stand-in."""

import pytest

from pykubeproxy.agent.quarantine import quarantine as set_aside
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend, Iptables, Runner, Tables
from pykubeproxy.objects import Deleted, Event, Family, Key, Kind, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.service import Entries, PortRules, port_rules, reject_rules
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ServicePort
from pykubeproxy.services.selection import Selection
from tests.fakes.rules import GivenRules
from tests.objects import service, slice_of

# No such counter is ever made, so that the kernel refuses every rule that counts into it.
IMPOSSIBLE = "-m nfacct --nfacct-name nobody"


@pytest.fixture(autouse=True)
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services named bad-… get a rule that the kernel refuses, the last in their last chain or in a shared one."""

    def spoil(port: ServicePort, selection: Selection, options: RuleOptions) -> PortRules:
        rules = port_rules(port, selection, options)
        if port.name.service.startswith("bad-chain") and (chains := tuple(rules.chains())):
            *others, (chain, texts) = chains
            return GivenRules((*others, (chain, (*texts, IMPOSSIBLE))), rules.entries)  # type: ignore[return-value]
        if port.name.service.startswith("bad-entry"):
            return GivenRules(tuple(rules.chains()), spoilt_entries(rules))  # type: ignore[return-value]
        return rules

    def spoil_refusal(port: ServicePort, options: RuleOptions) -> PortRules:
        rules = reject_rules(port, options)
        if port.name.service.startswith("bad-entry-wholly"):
            return PortRules(spoilt_entries(rules))
        return rules

    monkeypatch.setattr(set_aside, "port_rules", spoil)
    monkeypatch.setattr(set_aside, "reject_rules", spoil_refusal)


def spoilt_entries(rules: PortRules) -> Entries:
    return tuple(
        (key, tuple(text.replace(" -j ", f" {IMPOSSIBLE} -j ") for text in texts))
        for key, texts in rules.entries
    )


class Followed:
    """A cluster, and tables that follow it."""

    def __init__(self, tables: Tables) -> None:
        self.live = tables
        self.cluster = Cluster()
        self.tables = FamilyTables(tables, 30 if tables.backend is Backend.NFT else None)
        config = load(None, {"cluster-cidr": "10.244.0.0/16"}).config
        self.terms = rule_context(config, "node1", None, KernelFacts(nfacct=False), tables.family)

    def sync(self, *events: Event) -> SyncReport:
        touched = {key for event in events for key in self.cluster.apply(event)}
        return self.tables.sync(self.cluster, touched, self.terms)

    def saved(self) -> dict[ChainKey, tuple[str, ...]]:
        """Chains of ours, as they are."""
        return {key: rules for key, rules in self.live.save().chains.items() if key.chain.startswith("KUBE-")}

    def served(self) -> set[str]:
        """The cluster IPs that lead somewhere."""
        return {
            rule.split()[1] for rule in self.saved()[skeleton.NAT_SERVICES] if rule.startswith("-d 10.96")
        }

    def refused(self) -> set[str]:
        """The cluster IPs that are refused."""
        return {rule.split()[1] for rule in self.saved()[skeleton.FILTER_SERVICES] if "-j REJECT" in rule}


@pytest.fixture
def followed(tables: Tables) -> Followed:
    return Followed(tables)


def pair(name: str, number: int, *endpoints: str) -> tuple[Event, Event]:
    """A Service at 10.96.1.NUMBER with an endpoint of its own."""
    ip = f"10.96.{number // 250 + 1}.{number % 250}"
    targets = endpoints or (f"10.244.{number // 250}.{number % 250 + 1}",)
    return Updated(service(name, cluster_ip=ip)), Updated(slice_of(*targets, service=name))


def aside(report: SyncReport) -> list[str]:
    return [it.name for it in report.quarantined]


@pytest.mark.parametrize("kind", ["bad-chain", "bad-entry"])
def test_a_bad_service_among_others_at_the_start(followed: Followed, kind: str) -> None:
    """It is refused to its clients, all others are served, and the next sync has nothing to do."""
    good = [event for number in range(20) for event in pair(f"good{number}", number)]
    report = followed.sync(*good[:20], *pair(kind, 100), *good[20:])
    assert aside(report) == [kind]
    assert report.quarantined[0].rejects_clients
    assert report.quarantined[0].reason
    assert followed.served() == {f"10.96.1.{number}/32" for number in range(20)}
    assert followed.refused() == {"10.96.1.100/32"}
    assert not followed.sync().wrote
    assert aside(followed.sync()) == [kind]


def test_several_bad_ones_come_and_go(followed: Followed) -> None:
    """Each is found; one that turns good is served, one that is deleted leaves no trace."""
    followed.sync(*pair("good", 1))
    bad = [event for number in range(5) for event in pair(f"bad-chain{number}", 10 + number)]
    report = followed.sync(*bad, *pair("good2", 2), *pair("bad-entry", 30))
    assert aside(report) == [*(f"bad-chain{number}" for number in range(5)), "bad-entry"]
    assert followed.served() == {"10.96.1.1/32", "10.96.1.2/32"}
    assert len(followed.refused()) == 6
    # Without endpoints there are no chains, so nothing in them can be bad.
    report = followed.sync(
        Updated(slice_of(service="bad-chain0")), Deleted(Kind.SERVICE, Key("ns", "bad-chain1"))
    )
    assert aside(report) == ["bad-chain2", "bad-chain3", "bad-chain4", "bad-entry"]
    assert any(
        "ns/bad-chain0:http has no endpoints" in it for it in followed.saved()[skeleton.FILTER_SERVICES]
    )
    assert not any("bad-chain1" in it for rules in followed.saved().values() for it in rules)
    assert agrees(followed)


def test_a_good_one_that_turns_bad_and_good_again(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What led to its endpoints is taken out; when it changes it is tried again, and served if that is possible."""
    with monkeypatch.context() as patch:
        patch.setattr(set_aside, "port_rules", port_rules)
        followed.sync(*pair("good", 1), *pair("bad-chain", 2))
    assert followed.served() == {"10.96.1.1/32", "10.96.1.2/32"}
    before = followed.saved()
    assert aside(followed.sync(Updated(slice_of("10.244.9.8", "10.244.9.9", service="bad-chain")))) == [
        "bad-chain"
    ]
    assert followed.served() == {"10.96.1.1/32"}
    assert not any("10.244.9." in rule for rules in followed.saved().values() for rule in rules)
    assert len(followed.saved()) == len(before) - 2
    still = followed.sync(Updated(slice_of("10.244.9.7", service="bad-chain")))
    assert (aside(still), still.full) == (["bad-chain"], False)
    assert agrees(followed)
    with monkeypatch.context() as patch:
        patch.setattr(set_aside, "port_rules", port_rules)
        assert aside(followed.sync(Updated(slice_of("10.244.0.3", service="bad-chain")))) == []
    assert followed.saved() == before


def test_taken_up_by_a_full_sync(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the node can do what it could not, even if the Service does not change."""
    assert aside(followed.sync(*pair("good", 1), *pair("bad-entry", 2))) == ["bad-entry"]
    monkeypatch.setattr(set_aside, "port_rules", port_rules)
    assert aside(followed.sync(*pair("good2", 3))) == ["bad-entry"]
    followed.tables.require_resync()
    assert aside(followed.sync()) == []
    assert followed.served() == {"10.96.1.1/32", "10.96.1.2/32", "10.96.1.3/32"}


def test_not_even_its_refusal_can_be_written(followed: Followed) -> None:
    """Then a note that has no effect tells of it, and its packets are nobody's."""
    report = followed.sync(*pair("good", 1), *pair("bad-entry-wholly", 2))
    assert [(it.name, it.rejects_clients) for it in report.quarantined] == [("bad-entry-wholly", False)]
    assert followed.saved()[skeleton.FILTER_SERVICES] == (
        '-d 10.96.1.2/32 -p tcp -m comment --comment "ns/bad-entry-wholly:http port 80 is quarantined"',
    )
    assert followed.served() == {"10.96.1.1/32"}
    assert not followed.sync().wrote


def test_all_bad_but_the_node_is_well(followed: Followed) -> None:
    """A plain service would be taken, so they have only themselves to blame."""
    assert aside(followed.sync(*pair("bad-chain", 1), *pair("bad-entry", 2))) == ["bad-chain", "bad-entry"]
    assert followed.served() == set()


def test_nothing_of_the_trials_stays(followed: Followed) -> None:
    """The tables are those of a fresh start with the same services set aside."""
    followed.sync(*pair("good", 1), *pair("bad-chain", 2), *pair("bad-entry", 3))
    assert all(followed.saved()[canary] == () for canary in skeleton.CANARIES)
    assert agrees(followed)


def agrees(followed: Followed) -> bool:
    """Whether reading the live tables and going through everything finds nothing to write."""
    followed.tables.require_resync()
    before = followed.saved()
    # It may try what is set aside, which leaves no trace.
    followed.sync()
    return followed.saved() == before


@pytest.mark.root
def test_both_families(runner: Runner, iptables: Iptables) -> None:
    """IPv6 is no different."""
    ipv6 = iptables.family is Family.IPV6
    followed = Followed(iptables)
    for name, number in (("good", 1), ("bad-chain", 2), ("bad-entry", 3)):
        ip = f"fd00:10:96::{number}" if ipv6 else f"10.96.1.{number}"
        target = f"fd00:10:244::{number}" if ipv6 else f"10.244.0.{number}"
        followed.cluster.apply(Updated(service(name, cluster_ip=ip)))
        followed.cluster.apply(Updated(slice_of(target, service=name)))
    assert aside(followed.sync()) == ["bad-chain", "bad-entry"]
    assert len(followed.refused()) == 2
    assert agrees(followed)
