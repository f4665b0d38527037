"""Simulate the watches of many agents, in an outage of the API server and without one: `python -m tests.bench.retries`.

The agents' real retry code runs against a fake clock; the same seed gives the same figures.
"""

import heapq
import math
import random
from collections import Counter
from unittest import mock

import click
import msgspec
import structlog

from pykubeproxy.objects import Kind
from pykubeproxy.sources import Client, Timing
from pykubeproxy.sources.api import ApiWatch, resource_of
from pykubeproxy.sources.failures import Failure

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


def simulate(agents: int, outage: Failure, seconds: float, timing: Timing | None = None) -> Attempts:
    """Break all watches of the agents at once; each attempt fails until the outage ends after `seconds`."""
    clock = [0.0]
    random.seed(_SEED)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    with mock.patch("time.monotonic", lambda: clock[0]):
        client = Client(master="http://127.0.0.1:1")
        watches = [
            ApiWatch(client, resource_of(kind), timing or Timing()) for _ in range(agents) for kind in Kind
        ]
        return _run(watches, outage, clock, seconds)


def _run(watches: list[ApiWatch], outage: Failure, clock: list[float], seconds: float) -> Attempts:
    counts: Counter[int] = Counter()
    waiting: list[tuple[float, int]] = []  # when the watch of this number tries again
    start = clock[0] = _BEFORE
    for number, watch in enumerate(watches):
        watch._opened = 0.0
        watch._succeeded()
        heapq.heappush(waiting, (start + watch._failed(Failure("broke", server_wide=True)), number))
        watch._opened, watch._works = None, False
    last = 0.0
    while waiting:
        clock[0], number = heapq.heappop(waiting)
        last = clock[0] - start
        counts[int(last)] += 1
        if last < seconds:
            heapq.heappush(waiting, (clock[0] + watches[number]._failed(outage), number))
    return Attempts(dict(counts), seconds, last - seconds)


def renewals(agents: int, seconds: int) -> list[int]:
    """Return the requests for watches in each second after all watches of the agents have begun at once."""
    random.seed(_SEED)
    counts = [0] * seconds
    for _ in range(agents * len(Kind)):
        at = 0
        while (at := at + math.ceil(random.uniform(*Timing().watch))) < seconds:
            counts[at] += 1
    return counts


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
