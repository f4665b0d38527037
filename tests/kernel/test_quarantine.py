"""Quarantine services whose rules iptables rejects and serve all others, in both backends and the fake."""

import pytest

from pykubeproxy.agent import quarantine
from pykubeproxy.agent.notices import SyncReport
from pykubeproxy.kernel import Backend, Iptables, Runner, Tables
from pykubeproxy.objects import Deleted, Event, Family, Key, Kind, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey, Entries
from pykubeproxy.rules.service import PortRules, port_rules, reject_rules
from pykubeproxy.services.ports import ServicePort
from pykubeproxy.services.selection import Selection
from tests.fakes.rules import GivenRules
from tests.fakes.synced import SyncedFamily, flags_context
from tests.objects import service, slice_of

# This counter never exists, so the kernel rejects rules that use it.
IMPOSSIBLE = "-m nfacct --nfacct-name nobody"


@pytest.fixture(autouse=True)
def rejected_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a rule that the kernel rejects to services named bad-…, to their last or a shared chain."""

    def tampered_rules(port: ServicePort, selection: Selection, options: RuleOptions) -> PortRules:
        rules = port_rules(port, selection, options)
        if "bad-chain" in port.name.service and (chains := tuple(rules.chains())):
            *others, (chain, texts) = chains
            return GivenRules((*others, (chain, (*texts, IMPOSSIBLE))), rules.entries)  # type: ignore[return-value]
        if port.name.service.startswith("bad-entry"):
            return GivenRules(tuple(rules.chains()), tampered_entries(rules))  # type: ignore[return-value]
        return rules

    def tampered_reject_rules(port: ServicePort, options: RuleOptions) -> PortRules:
        rules = reject_rules(port, options)
        if port.name.service.startswith("bad-entry-wholly"):
            return PortRules(tampered_entries(rules))
        return rules

    monkeypatch.setattr(quarantine, "port_rules", tampered_rules)
    monkeypatch.setattr(quarantine, "reject_rules", tampered_reject_rules)


def tampered_entries(rules: PortRules) -> Entries:
    return tuple(
        (key, tuple(text.replace(" -j ", f" {IMPOSSIBLE} -j ") for text in texts))
        for key, texts in rules.entries
    )


class SyncedTables(SyncedFamily):
    """A cluster and its tables."""

    def __init__(self, tables: Tables) -> None:
        context = flags_context(tables.family, False, cluster_cidr="10.244.0.0/16")
        chains_per_block = 30 if tables.backend is Backend.NFT else None
        super().__init__(context=context, chains_per_block=chains_per_block, live=tables)

    def retry_all(self) -> SyncReport | None:
        """Try all quarantined ports again. Return the last report if some are accepted or need other rules."""
        self.tables.quarantine.retry([quarantined.port_name for quarantined in self.tables.quarantined()])
        return self.try_all()

    def saved(self) -> dict[ChainKey, tuple[str, ...]]:
        """Return our chains."""
        return {key: rules for key, rules in self.live.save().chains.items() if key.chain.startswith("KUBE-")}

    def served(self) -> set[str]:
        """Return the cluster IPs with a chain."""
        return {
            rule.split()[1] for rule in self.saved()[skeleton.NAT_SERVICES] if rule.startswith("-d 10.96")
        }

    def rejected(self) -> set[str]:
        """Return the cluster IPs with a REJECT rule."""
        return {rule.split()[1] for rule in self.saved()[skeleton.FILTER_SERVICES] if "-j REJECT" in rule}


@pytest.fixture
def synced(tables: Tables) -> SyncedTables:
    return SyncedTables(tables)


def pair(name: str, number: int, *endpoints: str) -> tuple[Event, Event]:
    """Return a Service at 10.96.1.NUMBER and its endpoint."""
    ip = f"10.96.{number // 250 + 1}.{number % 250}"
    targets = endpoints or (f"10.244.{number // 250}.{number % 250 + 1}",)
    return Updated(service(name, cluster_ip=ip)), Updated(slice_of(*targets, service=name))


def quarantined(report: SyncReport) -> list[str]:
    return [quarantined.name for quarantined in report.quarantined]


@pytest.mark.parametrize("kind", ["bad-chain", "bad-entry"])
def test_a_rejected_service_is_quarantined_at_the_start(synced: SyncedTables, kind: str) -> None:
    """Its clients are rejected, all others are served, and the next sync writes nothing."""
    good = [event for number in range(20) for event in pair(f"good{number}", number)]
    report = synced.sync_and_retry(*good[:20], *pair(kind, 100), *good[20:])
    assert quarantined(report) == [kind]
    assert report.quarantined[0].rejects_clients
    assert report.quarantined[0].reason
    assert synced.served() == {f"10.96.1.{number}/32" for number in range(20)}
    assert synced.rejected() == {"10.96.1.100/32"}
    assert not synced.sync_and_retry().wrote
    assert quarantined(synced.sync_and_retry()) == [kind]


def test_quarantined_services_come_and_go(synced: SyncedTables) -> None:
    """A repaired service is served; a deleted one leaves no rules."""
    synced.sync_and_retry(*pair("good", 1))
    bad = [event for number in range(5) for event in pair(f"bad-chain{number}", 10 + number)]
    report = synced.sync_and_retry(*bad, *pair("good2", 2), *pair("bad-entry", 30))
    assert quarantined(report) == [*(f"bad-chain{number}" for number in range(5)), "bad-entry"]
    assert synced.served() == {"10.96.1.1/32", "10.96.1.2/32"}
    assert len(synced.rejected()) == 6
    # A service without endpoints has no chains to reject.
    report = synced.sync_and_retry(
        Updated(slice_of(service="bad-chain0")), Deleted(Kind.SERVICE, Key("ns", "bad-chain1"))
    )
    assert quarantined(report) == ["bad-chain2", "bad-chain3", "bad-chain4", "bad-entry"]
    assert any(
        "ns/bad-chain0:http has no endpoints" in rule for rule in synced.saved()[skeleton.FILTER_SERVICES]
    )
    assert not any("bad-chain1" in rule for rules in synced.saved().values() for rule in rules)
    assert is_stable(synced)


def test_a_changed_service_enters_and_leaves_quarantine(
    synced: SyncedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rules are removed; each later change is tried."""
    with monkeypatch.context() as patch:
        patch.setattr(quarantine, "port_rules", port_rules)
        synced.sync_and_retry(*pair("good", 1), *pair("bad-chain", 2))
    assert synced.served() == {"10.96.1.1/32", "10.96.1.2/32"}
    before = synced.saved()
    assert quarantined(
        synced.sync_and_retry(Updated(slice_of("10.244.9.8", "10.244.9.9", service="bad-chain")))
    ) == ["bad-chain"]
    assert synced.served() == {"10.96.1.1/32"}
    assert not any("10.244.9." in rule for rules in synced.saved().values() for rule in rules)
    assert len(synced.saved()) == len(before) - 2
    second_report = synced.sync_and_retry(Updated(slice_of("10.244.9.7", service="bad-chain")))
    assert (quarantined(second_report), second_report.full) == (["bad-chain"], False)
    assert is_stable(synced)
    with monkeypatch.context() as patch:
        patch.setattr(quarantine, "port_rules", port_rules)
        assert quarantined(synced.sync_and_retry(Updated(slice_of("10.244.0.3", service="bad-chain")))) == []
    assert synced.saved() == before


def test_quarantined_services_are_retried(synced: SyncedTables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a change of the Service."""
    assert quarantined(synced.sync_and_retry(*pair("good", 1), *pair("bad-entry", 2))) == ["bad-entry"]
    monkeypatch.setattr(quarantine, "port_rules", port_rules)
    assert quarantined(synced.sync_and_retry(*pair("good2", 3))) == ["bad-entry"]
    report = synced.retry_all()
    assert report
    assert not report.full
    assert quarantined(report) == []
    assert synced.served() == {"10.96.1.1/32", "10.96.1.2/32", "10.96.1.3/32"}


def test_a_service_with_rejected_reject_rules_gets_a_comment_only(synced: SyncedTables) -> None:
    """The comment names it; its packets are not handled."""
    report = synced.sync_and_retry(*pair("good", 1), *pair("bad-entry-wholly", 2))
    assert [(quarantined.name, quarantined.rejects_clients) for quarantined in report.quarantined] == [
        ("bad-entry-wholly", False)
    ]
    assert synced.saved()[skeleton.FILTER_SERVICES] == (
        '-d 10.96.1.2/32 -p tcp -m comment --comment "ns/bad-entry-wholly:http port 80 is quarantined"',
    )
    assert synced.served() == {"10.96.1.1/32"}
    assert not synced.sync_and_retry().wrote


def test_all_services_may_be_quarantined(synced: SyncedTables) -> None:
    """The node is not at fault, because it accepts a plain service."""
    assert quarantined(synced.sync_and_retry(*pair("bad-chain", 1), *pair("bad-entry", 2))) == [
        "bad-chain",
        "bad-entry",
    ]
    assert synced.served() == set()


def test_each_service_is_served_before_and_after_a_search(synced: SyncedTables) -> None:
    """A suspect one keeps its rules; one that is new has none until a try accepts them."""
    good = [event for number in range(1, 31) for event in pair(f"good{number}", number)]
    every = {f"10.96.1.{number}/32" for number in range(1, 31)}
    synced.sync(*good[:40])
    before = synced.served()
    changed = [
        event for number in range(1, 31) for event in pair(f"good{number}", number, f"10.244.7.{number}")
    ]
    assert synced.sync(*changed, *pair("zz-bad-chain", 40)).held
    while synced.tables.quarantine.has_tries:
        assert synced.served() >= before
        synced.tables.try_next(synced.cluster)
        synced.check_known()
    synced.sync()
    assert (synced.served(), synced.rejected()) == (every, {"10.96.1.40/32"})
    assert is_stable(synced)


def test_a_search_leaves_no_rules(synced: SyncedTables) -> None:
    """The tables equal a fresh start's with the same quarantined services."""
    synced.sync_and_retry(*pair("good", 1), *pair("bad-chain", 2), *pair("bad-entry", 3))
    assert all(synced.saved()[canary] == () for canary in skeleton.CANARIES)
    assert is_stable(synced)


def is_stable(synced: SyncedTables) -> bool:
    """Return whether a full sync leaves the tables unchanged."""
    synced.tables.distrust()
    before = synced.saved()
    synced.retry_all()
    synced.sync_and_retry()
    return synced.saved() == before


@pytest.mark.root
def test_ipv6_services_are_quarantined_too(runner: Runner, iptables: Iptables) -> None:
    ipv6 = iptables.family is Family.IPV6
    synced = SyncedTables(iptables)
    for name, number in (("good", 1), ("bad-chain", 2), ("bad-entry", 3)):
        ip = f"fd00:10:96::{number}" if ipv6 else f"10.96.1.{number}"
        target = f"fd00:10:244::{number}" if ipv6 else f"10.244.0.{number}"
        synced.apply(Updated(service(name, cluster_ip=ip)), Updated(slice_of(target, service=name)))
    assert quarantined(synced.sync_and_retry()) == ["bad-chain", "bad-entry"]
    assert len(synced.rejected()) == 2
    assert is_stable(synced)
