"""Simulate the watches of many agents, in an outage of the API server and without one: `python -m tests.bench.retries`.

The agents' real retry code runs against a fake clock; the same seed gives the same figures.
"""

import heapq
import itertools
import random
from collections import Counter
from typing import NamedTuple
from unittest import mock

import click
import msgspec
import structlog

from pykubeproxy.sources.connection import ConnectionState, Pause, Reconnection, Timing
from pykubeproxy.sources.contact import Contact
from pykubeproxy.sources.failures import Failure

_RESOURCES = ("services", "endpointslices", "nodes")
# Seconds that the watches have been open when the outage begins.
_BEFORE = 300.0
_SEED = 1

OUTAGES = {
    "connections refused": Failure("no connection", server_wide=True),
    "429, Retry-After 1": Failure("fewer requests", retry_after=1.0, server_wide=True),
}


class Attempts(msgspec.Struct, frozen=True):
    """Attempts of all agents in each second since the start of the outage, and when all were watching again."""

    by_second: dict[int, int]
    end: float
    watched_after: float

    def total(self, seconds: int) -> int:
        """Return the attempts in the first seconds."""
        return sum(count for second, count in self.by_second.items() if second < seconds)

    def peak(self, start: float = 0.0) -> int:
        """Return the attempts in the busiest second from `start` on."""
        return max(count for second, count in self.by_second.items() if second >= start)


class _Watch(NamedTuple):
    state: ConnectionState
    agent: int


def simulate(agents: int, outage: Failure, seconds: float, timing: Timing | None = None) -> Attempts:
    """Break all watches of the agents at once; each attempt fails until the outage ends after `seconds`."""
    timing = timing or Timing()
    clock = [0.0]
    random.seed(_SEED)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    with mock.patch("time.monotonic", lambda: clock[0]):
        watches = [
            [_Watch(ConnectionState(resource, shared, timing, Contact()), agent) for resource in _RESOURCES]
            for agent in range(agents)
            for shared in [Reconnection(timing.first_pause, timing.longest_pause)]
        ]
        return _run(watches, outage, clock, seconds)


def _run(agents: list[list[_Watch]], outage: Failure, clock: list[float], seconds: float) -> Attempts:
    counts: Counter[int] = Counter()
    order = itertools.count()
    waiting: list[tuple[float, int, _Watch]] = []
    pauses: dict[int, Pause] = {}  # of the watches that wait, by identity

    def wait(watch: _Watch, failure: Failure) -> None:
        pause = pauses[id(watch.state)] = watch.state.failed(failure)
        heapq.heappush(waiting, (clock[0] + pause.seconds, next(order), watch))

    for watch in itertools.chain(*agents):
        watch.state.connecting()
        watch.state.opened()
    clock[0] += _BEFORE
    start = clock[0]
    for watch in itertools.chain(*agents):
        watch.state.outages.heard()
        wait(watch, Failure("the connection broke", server_wide=True))
    last = 0.0
    while waiting:
        at, _, watch = heapq.heappop(waiting)
        if pauses.pop(id(watch.state), None) is None:
            continue  # an open watch of its agent ended the pause
        clock[0] = max(at, clock[0])
        for tried in [watch, *_woken(agents[watch.agent], pauses, clock[0] - start >= seconds)]:
            counts[int(clock[0] - start)] += 1
            tried.state.connecting()
            if clock[0] - start < seconds:
                wait(tried, outage)
            else:
                pauses.pop(id(tried.state), None)
                tried.state.opened()
                last = clock[0] - start
    return Attempts(dict(counts), seconds, last - seconds)


def renewals(agents: int, seconds: int) -> list[int]:
    """Return the requests for watches in each second after all watches of the agents have begun at once."""
    random.seed(_SEED)
    timing = Timing()
    state = ConnectionState("", Reconnection(timing.first_pause, timing.longest_pause), timing, Contact())
    counts = [0] * seconds
    for _ in range(agents * len(_RESOURCES)):
        state.connecting()
        at = state.lifetime().check
        state.checking()
        while at < seconds:
            counts[int(at)] += 1
            at += state.lifetime().check
    return counts


def _woken(agent: list[_Watch], pauses: dict[int, Pause], open_again: bool) -> list[_Watch]:
    """Return the other waiting watches, whose pauses end when one is open again."""
    return [watch for watch in agent if id(watch.state) in pauses] if open_again else []


@click.command(
    help="Print the requests per second of many agents: after an outage of the API server, and at idle."
)
@click.option("--agents", type=click.IntRange(1), default=5000, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="The outage.")
def main(agents: int, seconds: float) -> None:
    """Print a table for each kind of outage."""
    for name, failure in OUTAGES.items():
        attempts = simulate(agents, failure, seconds)
        click.echo(f"{agents} agents, {name} for {seconds:.0f} s:")
        click.echo(f"  attempts in the first 10 s  {attempts.total(10):>7}")
        click.echo(f"  busiest second              {attempts.peak():>7}")
        click.echo(f"  busiest second after it     {attempts.peak(seconds):>7}")
        click.echo(f"  all watch again after       {attempts.watched_after:>7.1f} s")
        by_second = (str(attempts.by_second.get(second, 0)) for second in range(10))
        click.echo(f"  each of the first 10 s      {' '.join(by_second)}")
    counts = renewals(agents, 7200)
    click.echo(f"{agents} agents, two hours after all watches began at once:")
    click.echo(f"  watches renewed per second  {sum(counts) / len(counts):>7.1f}")
    click.echo(f"  busiest second              {max(counts):>7}")


if __name__ == "__main__":
    main()
