"""When to check for rules that other proxies have left."""

from pykubeproxy.agent.node_rules import LeftoverSchedule


def pauses(found: list[bool], period: float = 30.0) -> list[float]:
    """Return the pauses after checks with these results."""
    schedule = LeftoverSchedule(period, 0.0)
    waited = []
    for it in found:
        now = schedule.due
        schedule.checked(it, now)
        waited.append(schedule.due - now)
    return waited


def test_the_first_checks_follow_one_another_quickly() -> None:
    """A proxy that ends now may have written its rules again."""
    assert pauses([True, True, False, False, False, False, False]) == [1, 2, 4, 8, 16, 30, 30]


def test_a_proxy_that_keeps_running_is_left_alone_ever_longer() -> None:
    assert pauses([True] * 14)[-8:] == [64, 128, 256, 512, 1024, 2048, 3600, 3600]
    assert pauses([True] * 14 + [False])[-1] == 30
