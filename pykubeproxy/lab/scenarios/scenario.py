"""What a scenario is, and the few questions that all of them ask."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.pods import Pod
from pykubeproxy.lab.prober import Prober, Seen, Target
from pykubeproxy.lab.scenarios.chance import bounds

#: Told, while a scenario runs, what was tried (a few words) and what was seen.
Say = Callable[[str, object], None]

SETTLED = 40


class ScenarioFailed(AssertionError):
    """Connections did not go where they should; the text says what was expected and what was seen."""


@dataclass(frozen=True)
class Scenario:
    """One thing that the lab shows. `run` begins in an empty cluster and may leave anything behind.

    `does` says what happens, `why` which rule makes it so, `look` with what command to see it on a node.
    """

    name: str
    title: str
    does: str
    why: str
    look: str
    run: Callable[[Lab, Say], None]


def expect(condition: bool, expected: str, seen: object) -> None:
    """Raise ScenarioFailed unless the condition holds."""
    if not condition:
        raise ScenarioFailed(f"expected {expected}; seen: {seen}")


def names(pods: Iterable[Pod]) -> set[str]:
    """The pods' names."""
    return {pod.name for pod in pods}


def settle(lab: Lab, prober: Prober, target: Target, pods: Iterable[Pod]) -> float:
    """Wait until connections reach all of these pods and nothing else; returns after how many seconds."""
    wanted, last = names(pods), Seen()

    def reached() -> bool:
        nonlocal last
        last = prober.tcp(target)
        if not last.failed:  # one that fails may take its time-out
            last += prober.tcp(target, SETTLED)
        return not last.failed and set(last.pods) == wanted

    try:
        return lab.until(reached, "")
    except TimeoutError:
        expect(False, f"{target} to reach {', '.join(sorted(wanted))} before long", last)
        raise


def expect_only(seen: Seen, pods: Iterable[Pod]) -> None:
    """All connections were answered, and by each of these pods and no other."""
    wanted = names(pods)
    expect(
        not seen.failed and set(seen.pods) == wanted,
        f"answers from {', '.join(sorted(wanted))} and nobody else",
        seen,
    )


def expect_even(seen: Seen, pods: Iterable[Pod]) -> tuple[int, int]:
    """As `expect_only`, and each pod got its share within the bounds of chance; returns those bounds."""
    wanted = names(pods)
    expect_only(seen, pods)
    low, high = bounds(seen.total, 1 / len(wanted))
    expect(
        all(low <= count <= high for count in seen.pods.values()),
        f"{low} to {high} connections for each pod",
        seen,
    )
    return low, high


def expect_all(seen: Seen, error: str) -> None:
    """All connections failed in this way."""
    expect(set(seen.errors) == {error} and not seen.pods, f"every connection: {error}", seen)
