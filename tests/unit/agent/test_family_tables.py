"""Sync one family: failures, and the threshold for large clusters."""

import re

import msgspec
import pytest

from pykubeproxy.agent.tables import FamilyTables, SyncFailed
from pykubeproxy.kernel import Failed
from pykubeproxy.objects import Deleted, Endpoint, Event, Family, Key, Kind, Port, Protocol, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.ports import ApiServers, Reserved
from tests.fakes.drift import scope
from tests.fakes.synced import SyncedFamily, flags_context
from tests.objects import endpoint, service, slice_of


def context(api_servers: ApiServers = frozenset(), **flags: object) -> RuleContext:
    reserved = dict.fromkeys(api_servers, Reserved.API_SERVER)
    return msgspec.structs.replace(
        flags_context(Family.IPV4, cluster_cidr="10.244.0.0/16", **flags), reserved=reserved
    )


def synced_with(*events: Event) -> SyncedFamily:
    """Return tables that follow a cluster."""
    made = SyncedFamily(context=context())
    made.sync(*events)
    return made


def equals_fresh_start(synced: SyncedFamily) -> bool:
    """Return whether the tables equal those that a fresh start writes."""
    fresh = synced.fresh()
    fresh.sync()
    return synced.chains() == fresh.chains()


WEB = (Updated(service()), Updated(slice_of("10.244.1.5")))


def test_rules_are_counted_as_in_kube_proxy() -> None:
    """Those of empty tables, with the guard of loopback addresses and without jumps."""
    assert synced_with().sync().rules == {"filter": 4, "nat": 5, "mangle": 0}
    without_guard = synced_with().sync(context=context(iptables_localhost_nodeports=False))
    assert without_guard.rules == {"filter": 3, "nat": 5, "mangle": 0}


def endpoints(count: int) -> tuple[Endpoint, ...]:
    """Return endpoints; every second one is not ready, and counts as well."""
    return tuple(endpoint(f"10.244.{n // 250}.{n % 250 + 1}", ready=n % 2 == 0) for n in range(count))


def comments(chains: dict[ChainKey, tuple[str, ...]], prefix: str) -> int:
    return sum("--comment" in rule for key in chains if key.chain.startswith(prefix) for rule in chains[key])


OTHER = (
    Updated(service("other", cluster_ip="10.96.0.11")),
    Updated(slice_of("10.244.9.9", service="other")),
)


def test_beyond_a_thousand_endpoints_written_chains_lack_comments() -> None:
    """At a fresh start these are all chains of services."""
    synced = synced_with(*WEB, Updated(slice_of(*endpoints(999))), *OTHER)
    assert comments(synced.chains(), "KUBE-SEP-") == 2 * 501
    synced = synced_with(*WEB, Updated(slice_of(*endpoints(1000))), *OTHER)
    assert comments(synced.chains(), "KUBE-SEP-") == 0
    # The masquerading rules keep their comments.
    assert comments(synced.chains(), "KUBE-SVC-") == 2


def test_crossing_a_thousand_endpoints_writes_only_chains_that_change() -> None:
    """One tenant that crosses the limit again and again must not cause syncs of all Services."""
    synced = synced_with(*WEB, Updated(slice_of(*endpoints(997))), *OTHER)
    other = {
        key: rules for key, rules in synced.chains().items() if any("ns/other" in rule for rule in rules)
    }
    for count in (1001, 997, 1001):
        report = synced.sync(Updated(slice_of(*endpoints(count))))
        # Groups of endpoints and the chain that picks one of them; of four endpoints, two are ready.
        assert (report.full, len(report.resolved)) == (False, 1)
        assert 0 < report.chains_written < 8
    assert {key: synced.chains()[key] for key in other} == other
    assert 0 < comments(synced.chains(), "KUBE-SEP-") < 2 * 501


def test_comments_of_service_chains_are_no_reason_to_write() -> None:
    """Nor are they drift: not if another program removes some, and not after the limit was crossed."""
    synced = synced_with(*WEB, Updated(slice_of(*endpoints(999))), *OTHER)
    nat = synced.live.tables["nat"]
    (chain,) = [
        name for name, rules in nat.items() if any("--to-destination 10.244.9.9:" in it for it in rules)
    ]
    nat[chain] = tuple(re.sub('-m comment --comment "[^"]*" ', "", rule) for rule in nat[chain])
    assert synced.tables.note_drift(scope()) is None
    synced.sync(Updated(slice_of(*endpoints(1001))))
    before = synced.chains()
    assert synced.tables.note_drift(scope()) is None
    synced.tables.distrust()
    assert not synced.sync().wrote
    synced.tables = FamilyTables(synced.live, 200)
    assert not synced.sync().wrote
    assert synced.chains() == before
    synced.live.tables["nat"][chain] += ("-j RETURN",)
    drift = synced.tables.note_drift(scope())
    assert drift
    assert not drift.missing
    (repaired,) = synced.sync().drift
    assert (repaired.rules, repaired.foreign_rules) == (0, 1)


def test_endpoints_are_counted_per_family() -> None:
    """A thousand IPv6 endpoints do not drop IPv4's comments."""
    six = tuple(endpoint(f"fd00::{n + 1:x}") for n in range(1500))
    both = service(cluster_ips=("10.96.0.10", "fd00:96::10"))
    synced = synced_with(Updated(both), Updated(slice_of("10.244.1.5")), Updated(slice_of(*six)))
    assert comments(synced.chains(), "KUBE-SEP-") == 2


def test_a_sync_that_fails_halfway_makes_no_other_one_full() -> None:
    """The next one reads what is uncertain, and goes through the Services that it has to write."""
    synced = synced_with(*WEB, *OTHER)
    synced.write_block_by_block()
    change = Updated(slice_of(endpoint("10.244.1.5", ready=False)))
    for blocks in range(3):
        synced.fail_after(blocks, lambda it: it.round(change))
        synced.check_known()
        report = synced.sync()
        assert not report.full
        assert len(report.resolved) <= 1
        synced.check_known()
        assert equals_fresh_start(synced)
        change = Updated(slice_of("10.244.1.5")) if blocks % 2 == 0 else change


def test_a_failed_reading_is_repeated() -> None:
    synced = synced_with(*WEB)
    synced.tables.distrust()
    saved, synced.live.failure = len(synced.live.texts), Failed("iptables-save", 1, "killed")
    with pytest.raises(Failed):
        synced.sync(Updated(slice_of("10.244.1.6")))
    synced.live.failure = None
    synced.sync()
    assert len(synced.live.texts) == saved + 1
    assert equals_fresh_start(synced)


def test_rules_are_counted_once_whatever_happens_to_the_tables() -> None:
    """After a flush and a full sync, numbers are as before."""
    synced = synced_with(*WEB, *OTHER)
    before = synced.sync()
    synced.live.tables.clear()
    synced.tables.distrust()
    after = synced.sync()
    assert (after.endpoints, after.rules) == (before.endpoints, before.rules)
    assert after.table_counts.ours == before.table_counts.ours
    synced.check_known()


def test_a_rejected_rule_names_its_service() -> None:
    """If no service can be written, none is quarantined and the tables stay unchanged."""
    synced = synced_with(*WEB)
    synced.live.rejects = lambda rule: "-j DNAT" in rule
    before = synced.chains()
    with pytest.raises(SyncFailed) as caught:
        synced.sync(Updated(slice_of("10.244.1.5", "10.244.1.6")))
    assert "ns/web:http" in str(caught.value)
    assert "ns/web:http" in str(caught.value)
    assert synced.chains() == before


def test_a_sync_without_changes_does_not_access_the_kernel() -> None:
    """Events that change no rule neither read nor write tables."""
    synced = synced_with(*WEB)
    saves, texts = synced.live.saves, len(synced.live.texts)
    synced.sync(Updated(slice_of("10.244.1.5")))
    assert (synced.live.saves, len(synced.live.texts)) == (saves, texts)


def test_a_changed_masquerade_mark_replaces_the_old_one() -> None:
    """No rule keeps the old mark."""
    synced = synced_with(*WEB)
    synced.sync(context=context(iptables_masquerade_bit=31))
    rules = [
        rule for rules in synced.chains().values() for rule in rules if "mark" in rule.split("--comment")[0]
    ]
    assert not [rule for rule in rules if "0x4000" in rule]
    assert any("0x80000000" in rule for rule in rules)


def test_deleted_chains_are_counted() -> None:
    """Both partial and full syncs count them."""
    synced = synced_with(*WEB)
    report = synced.sync(Deleted(Kind.SERVICE, Key("ns", "web")))
    assert (report.full, report.chains_deleted) == (False, 2)
    synced.live.tables["nat"]["KUBE-SVC-OLD"] = ("-j KUBE-SEP-OLD",)
    synced.live.tables["nat"]["KUBE-SEP-OLD"] = ()
    synced.tables.distrust()
    assert synced.sync().chains_deleted == 2


def test_a_full_sync_that_only_deletes_reports_a_write() -> None:
    """Flows created by the deleted rules may be stale."""
    synced = synced_with(*WEB)
    synced.live.tables["nat"]["KUBE-SVC-OLD"] = ("-j RETURN",)
    synced.tables.distrust()
    report = synced.sync()
    assert (report.full, report.chains_written, report.wrote) == (True, 0, True)
    synced.tables.distrust()
    assert not synced.sync().wrote


def test_of_two_ports_with_the_same_name_the_last_counts() -> None:
    """The API server rejects such a Service, a manifest may hold one; its chains hold the rules of one port."""
    ports = (Port("http", Protocol.TCP, 80), Port("http", Protocol.TCP, 8080))
    synced = synced_with(Updated(service(ports=ports)), Updated(slice_of("10.244.1.5")))
    assert synced.chains()[skeleton.NAT_SERVICES][0].count("--dport 8080") == 1
    assert len(synced.chains()[skeleton.NAT_SERVICES]) == 2
    synced.tables.distrust()
    assert not synced.sync().wrote
    assert not synced.tables.note_drift(scope())


def test_rules_that_are_no_longer_wanted_are_not_reported_as_restored() -> None:
    """The rule for 127.0.0.0/8 is gone from the kubelet's chain, and so is the setting that needs it."""
    synced = synced_with(*WEB)
    synced.live.tables["filter"]["KUBE-FIREWALL"] = ()
    assert synced.tables.note_drift(scope())
    assert not synced.sync(context=context(iptables_localhost_nodeports=False)).drift


def test_a_chain_that_others_refer_to_counts_as_written_when_it_is_emptied() -> None:
    """It cannot be deleted."""
    synced = synced_with(*WEB)
    synced.live.tables["nat"].update({"KUBE-SVC-OLD": ("-j RETURN",), "THEIRS": ("-j KUBE-SVC-OLD",)})
    synced.tables.distrust()
    report = synced.sync()
    assert (report.chains_written, report.chains_deleted) == (1, 0)
    assert synced.chains()[ChainKey("nat", "KUBE-SVC-OLD")] == ()


def test_addresses_of_the_api_server_take_effect_without_other_changes() -> None:
    """A new one is no longer served, and one that is gone is served again."""
    claimed = service(external_ips=("203.0.113.7",))
    synced = synced_with(Updated(claimed), WEB[1])

    def serves() -> bool:
        return any("203.0.113.7" in rule for rules in synced.chains().values() for rule in rules)

    assert serves()
    saves = synced.live.saves
    report = synced.sync(*OTHER, context=context(frozenset({("192.0.2.9", 443)})))
    # Only the other Service is new; nobody claims the address.
    assert (report.full, [port.port.name.service for port in report.resolved]) == (False, ["other"])
    report = synced.sync(context=context(frozenset({("203.0.113.7", 80)})))
    (port,) = report.resolved
    assert (report.full, synced.live.saves) == (False, saves)
    assert [ip for ip, _ in port.port.skipped_ips] == ["203.0.113.7"]
    assert not serves()
    synced.sync(context=context())
    assert serves()
    assert equals_fresh_start(synced)


def test_a_deleted_chain_is_made_again_although_its_last_entry_goes() -> None:
    """The jumps to it, which went with it, come back in the same sync."""
    synced = synced_with(WEB[0])
    before = synced_with().chains()
    for chain, rules in synced.live.tables["filter"].items():
        synced.live.tables["filter"][chain] = tuple(it for it in rules if "-j KUBE-SERVICES" not in it)
    del synced.live.tables["filter"]["KUBE-SERVICES"]
    assert synced.tables.note_drift(scope())
    synced.sync(Deleted(Kind.SERVICE, service().key))
    assert synced.chains() == before
