"""A configuration taken up by a running loop, on a clock of the test's own and tables in memory."""

import pytest

from pykubeproxy.agent import loop
from pykubeproxy.agent.mailbox import Reconfigured
from pykubeproxy.config import Config
from pykubeproxy.objects import Updated
from tests.objects import slice_of
from tests.unit.agent.test_loop import STARTED, STOP, WEB, Clock, Family4, at, config, run


@pytest.fixture(autouse=True)
def set_up(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations for which the kernel was set up."""
    made: list[Config] = []
    monkeypatch.setattr(loop, "set_up", made.append)
    monkeypatch.setattr(loop, "remove_nftables_mode", lambda: None)
    return made


def written(family: Family4, clock: Clock) -> list[float]:
    """The times of restores, in seconds since the start."""
    times: list[float] = []
    restore = family.live.restore

    def noted(text: str) -> None:
        times.append(clock.now - 1000)
        restore(text)

    family.live.restore = noted  # type: ignore[method-assign]
    return times


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"clusterCIDR": "10.200.0.0/16"}, "! -s 10.200.0.0/16"),
        (
            {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "veth"}},
            "! -i veth+",
        ),
        ({"iptables": {"masqueradeAll": True}}, 'web:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ'),
    ],
)
def test_rules_follow(fields: dict[str, object], rule: str, set_up: list[Config]) -> None:
    """Without any change in the cluster the rules are those of the new configuration, and the kernel is set up."""
    family, clock, new = Family4(), Clock(), config(**fields)
    run(family, clock, *STARTED, *at(10, Reconfigured(new)), *at(20, STOP))
    assert any(rule in line for line in family.rules(WEB))
    assert set_up == [new]


def test_a_shorter_minimum_counts_at_once() -> None:
    """What waits for the old minimum need wait no longer."""
    family, clock = Family4(), Clock()
    times = written(family, clock)
    slow, quick = (config(iptables={"minSyncPeriod": it, "syncPeriod": "1h"}) for it in ("10m", "1s"))
    changed = at(10, Updated(slice_of("10.244.1.6")))
    run(family, clock, *STARTED, *changed, *at(20, Reconfigured(quick)), *at(30, STOP), settings=slow)
    assert times == [1, 20]


def test_a_longer_minimum_counts_at_once() -> None:
    """From the end of the last run on."""
    family, clock = Family4(), Clock()
    times = written(family, clock)
    slow = config(iptables={"minSyncPeriod": "20s"})
    changed = at(10, Updated(slice_of("10.244.1.6")))
    run(family, clock, *STARTED, *at(5, Reconfigured(slow)), *changed, *at(100, STOP))
    assert times == [1, 21]


def test_a_shorter_sync_period_counts_at_once() -> None:
    """A flushed table is noticed within the new one, though the old one was an hour."""

    def flush() -> None:
        family.live.tables.clear()

    family, clock = Family4(), Clock()
    slow, quick = (config(iptables={"syncPeriod": it}) for it in ("1h", "10s"))
    run(family, clock, *STARTED, *at(20, Reconfigured(quick)), (40, flush), *at(60, STOP), settings=slow)
    assert family.rules(WEB)
