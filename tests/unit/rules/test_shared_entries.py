"""The entries of shared chains, kept from update to update: the same rules as without, for the cost of what changes."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.config import Dispatch
from pykubeproxy.objects import EndpointPort, Key, Port, Protocol, Updated
from pykubeproxy.rules import dispatch
from pykubeproxy.rules.dispatch import SharedEntries, shared_chain
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.skeleton import FILTER_EXTERNAL, FILTER_SERVICES, NAT_NODEPORTS, NAT_SERVICES
from pykubeproxy.rules.text import host, rule
from tests.fakes.synced import SyncedFamily
from tests.objects import service, slice_of

pytestmark = pytest.mark.usefixtures("small_trees")

SERVICES = st.sampled_from([Key("ns", f"s{n}") for n in range(4)])
RULES = st.builds(
    lambda address, port, kind: rule(
        f"-m tcp --dport {port}",
        destination=host(address) if address else "",
        protocol="tcp",
        comment=f"ns/s:{port} {kind}",
        target="REJECT",
    ),
    st.sampled_from(["", *(f"10.96.{n}.{n}" for n in range(9))]),
    st.integers(1, 30),
    st.sampled_from(["cluster IP", "external IP"]),
)
CHANGES = st.dictionaries(SERVICES, st.lists(RULES, max_size=20, unique=True).map(tuple), max_size=3)


@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(CHANGES, min_size=1, max_size=6),
    key=st.sampled_from([NAT_SERVICES, NAT_NODEPORTS, FILTER_SERVICES, FILTER_EXTERNAL]),
    form=st.sampled_from(Dispatch),
)
def test_entries_that_were_replaced_give_the_rules_of_new_ones(
    changes: list[Mapping[Key, tuple[str, ...]]], key: ChainKey, form: Dispatch
) -> None:
    kept, services = SharedEntries(key), dict[Key, tuple[str, ...]]()
    for change in changes:
        before, kept = kept, kept.replacing(change)
        assert {*before.lost(kept)} == {*_all(kept)} - {*_all(before)}
        services |= change
        made = kept.arranged(("-j X",), form)
        new = shared_chain(key, [((key, services[it]),) for it in sorted(services)], ("-j X",), form)
        assert made.root == new.root
        assert dict(made.chains) == dict(new.chains)


def _all(entries: SharedEntries) -> list[str]:
    return [text for rules in entries.services.values() for text in rules]


def test_a_change_regroups_only_its_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ports of others are rejected in the same chain."""
    node = SyncedFamily()
    ports = tuple(Port(f"p{n}", Protocol.TCP, n) for n in range(1, 1500))
    target = (EndpointPort("http", Protocol.TCP, 8080),)
    wide = Updated(service("wide", cluster_ip="10.96.0.11", ports=ports))
    small = Updated(service("small")), Updated(slice_of("10.244.1.5", service="small", ports=target))
    node.sync(wide, *small)
    grouped: list[str] = []

    def counted(rules: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        grouped.extend(rules)
        return by_address(rules)

    by_address = dispatch._by_address
    monkeypatch.setattr(dispatch, "_by_address", counted)
    report = node.sync(Updated(slice_of(service="small", ports=target)))
    assert report.rules_written["filter"] > 0
    assert 0 < len(grouped) < 20
