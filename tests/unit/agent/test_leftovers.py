"""When to look for rules that other proxies have left."""

from pykubeproxy.agent.leftovers import LeftoverSchedule


def looks(found: list[bool], period: float = 30.0) -> list[float]:
    """Return the pauses after looks with these results."""
    schedule = LeftoverSchedule(period, 0.0)
    pauses = []
    for it in found:
        now = schedule.due
        schedule.looked(it, now)
        pauses.append(schedule.due - now)
    return pauses


def test_the_first_looks_follow_one_another_quickly() -> None:
    """A proxy that ends now may have written its rules again."""
    assert looks([True, True, False, False, False, False, False]) == [1, 2, 4, 8, 16, 30, 30]


def test_a_proxy_that_keeps_running_is_left_alone_ever_longer() -> None:
    assert looks([True] * 14)[-8:] == [64, 128, 256, 512, 1024, 2048, 3600, 3600]
    assert looks([True] * 14 + [False])[-1] == 30
