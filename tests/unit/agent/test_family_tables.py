"""The tables of one family over failures and across the border between small and large clusters."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator

import pytest

from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.agent.sync.tables import FamilyTables, SyncFailed
from pykubeproxy.config import load
from pykubeproxy.kernel import Failed, KernelError, TableCounts, WatchedTables
from pykubeproxy.objects import Deleted, Endpoint, Event, Family, Key, Kind, Port, Protocol, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.cluster import Cluster
from tests.fakes.drift import scope
from tests.fakes.iptables import FakeIptables
from tests.objects import endpoint, service, slice_of
from tests.strategies import NODE


def on_terms(**iptables: object) -> RuleContext:
    document = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clusterCIDR": "10.244.0.0/16",
        "iptables": iptables,
    }
    return rule_context(load(document, {}).config, NODE, None, KernelFacts(), Family.IPV4)


class Followed:
    """A cluster and the tables that follow it."""

    def __init__(self, *events: Event) -> None:
        self.cluster = Cluster()
        self.live = FakeIptables()
        self.live.counters.update(skeleton.NFACCT_NAMES)
        self.tables = FamilyTables(self.live, 200)
        self.apply(*events)

    def apply(self, *events: Event, on: RuleContext | None = None) -> None:
        self.sync(*events, on=on)

    def sync(self, *events: Event, on: RuleContext | None = None) -> SyncReport:
        changed = {key for event in events for key in self.cluster.apply(event)}
        return self.tables.sync(self.cluster, changed, on or on_terms())

    def chains(self) -> dict[ChainKey, tuple[str, ...]]:
        return dict(self.live.save().chains)

    def agrees(self) -> bool:
        """Whether the tables are those that a fresh start would write."""
        fresh = FakeIptables()
        fresh.counters.update(skeleton.NFACCT_NAMES)
        FamilyTables(fresh, None).sync(self.cluster, (), on_terms())
        return self.chains() == dict(fresh.save().chains)


WEB = (Updated(service()), Updated(slice_of("10.244.1.5")))


def many(count: int) -> tuple[Endpoint, ...]:
    """Endpoints of which every second one is not ready: those count as well."""
    return tuple(endpoint(f"10.244.{n // 250}.{n % 250 + 1}", ready=n % 2 == 0) for n in range(count))


def comments(chains: dict[ChainKey, tuple[str, ...]], prefix: str) -> int:
    return sum("--comment" in rule for key in chains if key.chain.startswith(prefix) for rule in chains[key])


def test_exactly_a_thousand_endpoints_are_not_many() -> None:
    """One more, and comments go; one less, and they are back, also in services that did not change."""
    other = slice_of("10.244.9.9", service="other")
    followed = Followed(*WEB, Updated(service("other", cluster_ip="10.96.0.11")), Updated(other))
    followed.apply(Updated(slice_of(*many(999))))
    assert comments(followed.chains(), "KUBE-SEP-") == 2 * 501
    followed.apply(Updated(slice_of(*many(1000))))
    assert comments(followed.chains(), "KUBE-SEP-") == 0
    # What marks for masquerading keeps its comment.
    assert comments(followed.chains(), "KUBE-SVC-") == 2
    assert followed.agrees()
    followed.apply(Updated(slice_of(*many(999))))
    assert comments(followed.chains(), "KUBE-SEP-") == 2 * 501
    assert followed.agrees()


def test_families_are_counted_apart() -> None:
    """A thousand endpoints of IPv6 do not take IPv4's comments."""
    six = tuple(endpoint(f"fd00::{n + 1:x}") for n in range(1500))
    both = service(cluster_ips=("10.96.0.10", "fd00:96::10"))
    followed = Followed(Updated(both), Updated(slice_of("10.244.1.5")), Updated(slice_of(*six)))
    assert comments(followed.chains(), "KUBE-SEP-") == 2


@pytest.mark.parametrize("where", ["save", "restore"])
def test_after_a_failure_everything_is_gone_through(where: str) -> None:
    """Even if the failed restore has carried out a part of its blocks."""
    followed = Followed(*WEB)
    whole = getattr(followed.live, where)

    def half(text: str) -> None:
        if where == "restore":
            whole(text.split("COMMIT\n")[0] + "COMMIT\n")
        raise Failed("iptables-restore", 1, "killed")

    followed.tables.require_resync()
    setattr(followed.live, where, half)
    with pytest.raises((SyncFailed, KernelError)):
        followed.apply(Updated(slice_of(endpoint("10.244.1.5", ready=False))))
    setattr(followed.live, where, whole)
    followed.apply()
    assert followed.agrees()


class Deaf:
    """A watch that the kernel does not answer before a write, or after it, for want of memory."""

    name = "drift"

    def __init__(self) -> None:
        self.fails = ""

    @contextlib.contextmanager
    def own_writes(self, family: Family) -> Iterator[Callable[[str], None]]:
        self._fail("before")
        yield lambda text: None
        self._fail("after")

    def _fail(self, when: str) -> None:
        if self.fails == when:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    def command_started(self, process: int) -> None: ...
    def synced(self, family: Family, counts: TableCounts) -> None: ...
    def run(self) -> None: ...


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_watch_that_gets_no_answer_is_a_failure_like_others(when: str) -> None:
    """The agent says why and tries again, where anything but a KernelError would end it."""
    followed, deaf = Followed(), Deaf()
    followed.tables = FamilyTables(WatchedTables(followed.live, deaf), 200)
    deaf.fails = when
    with pytest.raises(SyncFailed, match="cannot watch the tables while writing to them: No buffer space"):
        followed.apply(*WEB)
    deaf.fails = ""
    followed.apply()
    assert followed.agrees()


def test_a_refused_rule_names_its_service() -> None:
    """Where no service at all can be written none is set aside, and what was written before stays as it was."""
    followed = Followed(*WEB)
    followed.live.refuses = lambda rule: "-j DNAT" in rule
    before = followed.chains()
    with pytest.raises(SyncFailed) as caught:
        followed.apply(Updated(slice_of("10.244.1.5", "10.244.1.6")))
    assert caught.value.service == "ns/web:http"
    assert "ns/web:http" in str(caught.value)
    assert followed.chains() == before


def test_a_sync_without_any_change_asks_the_kernel_nothing() -> None:
    """Events that concern nobody cost nothing."""
    followed = Followed(*WEB)
    saves, texts = followed.live.saves, len(followed.live.texts)
    followed.apply(Updated(slice_of("10.244.1.5")))
    assert (followed.live.saves, len(followed.live.texts)) == (saves, texts)


def test_another_mark_is_written_everywhere() -> None:
    """No rule keeps the old one."""
    followed = Followed(*WEB)
    followed.apply(on=on_terms(masqueradeBit=31))
    rules = [
        rule for rules in followed.chains().values() for rule in rules if "mark" in rule.split("--comment")[0]
    ]
    assert not [rule for rule in rules if "0x4000" in rule]
    assert any("0x80000000" in rule for rule in rules)


def test_deleted_chains_are_counted() -> None:
    """Those of a partial sync, and those that a full sync finds unused in the tables."""
    followed = Followed(*WEB)
    report = followed.sync(Deleted(Kind.SERVICE, Key("ns", "web")))
    assert (report.full, report.chains_deleted) == (False, 2)
    followed.live.tables["nat"]["KUBE-SVC-OLD"] = ("-j KUBE-SEP-OLD",)
    followed.live.tables["nat"]["KUBE-SEP-OLD"] = ()
    followed.tables.require_resync()
    assert followed.sync().chains_deleted == 2


def test_a_full_sync_that_only_deletes_has_written() -> None:
    """Flows made by the deleted rules may be stale."""
    followed = Followed(*WEB)
    followed.live.tables["nat"]["KUBE-SVC-OLD"] = ("-j RETURN",)
    followed.tables.require_resync()
    report = followed.sync()
    assert (report.full, report.chains_written, report.wrote) == (True, 0, True)
    followed.tables.require_resync()
    assert not followed.sync().wrote


def test_of_two_ports_with_the_same_name_the_last_counts() -> None:
    """The API server rejects such a Service, a manifest may hold one; its chains hold the rules of one port."""
    ports = (Port("http", Protocol.TCP, 80), Port("http", Protocol.TCP, 8080))
    followed = Followed(Updated(service(ports=ports)), Updated(slice_of("10.244.1.5")))
    assert followed.chains()[skeleton.NAT_SERVICES][0].count("--dport 8080") == 1
    assert len(followed.chains()[skeleton.NAT_SERVICES]) == 2
    followed.tables.require_resync()
    assert not followed.sync().wrote
    assert not followed.tables.detect_drift(scope())


def test_rules_that_are_no_longer_wanted_are_not_reported_as_restored() -> None:
    """The rule for 127.0.0.0/8 is gone from the kubelet's chain, and so is the setting that needs it."""
    followed = Followed(*WEB)
    followed.live.tables["filter"]["KUBE-FIREWALL"] = ()
    assert followed.tables.detect_drift(scope())
    assert not followed.sync(on=on_terms(localhostNodePorts=False)).drift


def test_a_chain_that_others_refer_to_counts_as_written_when_it_is_emptied() -> None:
    """It cannot be deleted."""
    followed = Followed(*WEB)
    followed.live.tables["nat"].update({"KUBE-SVC-OLD": ("-j RETURN",), "THEIRS": ("-j KUBE-SVC-OLD",)})
    followed.tables.require_resync()
    report = followed.sync()
    assert (report.chains_written, report.chains_deleted) == (1, 0)
    assert followed.chains()[ChainKey("nat", "KUBE-SVC-OLD")] == ()
