"""The definition of a scenario, the checks that scenarios share, and the inspection commands they run."""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pykubeproxy.lab.agents import COMMAND, node_environment
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import Namespace
from pykubeproxy.lab.pods import LabPod
from pykubeproxy.lab.prober import Prober, ProbeResult, ProbeTarget

SECONDS = 180.0
_PLUGIN = [sys.executable, "-c", "from pykubeproxy.cli.kubectl import main; main()"]
#: Write an entry of the scenario's log: a label and an observation.
Log = Callable[[str, object], None]
SETTLE_CONNECTIONS = 40
#: The probability that a correct proxy fails one statistical check.
FALSE_ALARM = 1e-6


class CommandAnswer(NamedTuple):
    """The exit code of a command and its output, without line breaks."""

    code: int
    text: str


def run_on_node(lab: Lab, node: str, command: str) -> CommandAnswer:
    """Run `pykubeproxy COMMAND` on a node; raises TimeoutExpired after 30 seconds."""
    return _run([*COMMAND, *command.split()], lab.nodes[node].namespace, node_environment(lab.logs, node))


def run_plugin(lab: Lab, command: str) -> CommandAnswer:
    """Run `kubectl pykubeproxy COMMAND` on the outside client; raises TimeoutExpired after 30 seconds."""
    environment = {**node_environment(lab.logs, "outside"), "KUBECONFIG": str(lab.directory.kubeconfig)}
    return _run([*_PLUGIN, *command.split()], lab.outside.namespace, environment)


def _run(command: Sequence[str], where: Namespace, environment: Mapping[str, str]) -> CommandAnswer:
    with where.entered():
        done = subprocess.run(
            command,
            env={**environment, "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    return CommandAnswer(done.returncode, " ".join(done.stdout.split()))


class ScenarioFailed(AssertionError):
    """A check failed; the text has the expectation and the observation."""


def expect(condition: bool, expectation: str, observation: object) -> None:
    """Raise ScenarioFailed unless the condition holds."""
    if not condition:
        raise ScenarioFailed(f"expected {expectation}; observed: {observation}")


def names(pods: Iterable[LabPod]) -> set[str]:
    return {pod.name for pod in pods}


@dataclass(frozen=True)
class Run:
    """A run of a scenario in a lab."""

    lab: Lab
    log: Log

    def settle(self, prober: Prober, target: ProbeTarget, pods: Iterable[LabPod]) -> float:
        """Wait until connections reach exactly these pods; return the seconds it took."""
        expected, last = names(pods), ProbeResult()

        def settled() -> bool:
            nonlocal last
            last = prober.tcp(target)
            if not last.failed:  # more attempts could each take a timeout
                last += prober.tcp(target, SETTLE_CONNECTIONS)
            return not last.failed and set(last.pods) == expected

        try:
            return self.lab.until(settled, "")
        except TimeoutError:
            expectation = f"{target} to reach {', '.join(sorted(expected))} in time"
            raise ScenarioFailed(f"expected {expectation}; observed: {last}") from None

    def check_balanced(
        self, label: str, prober: Prober, target: ProbeTarget, pods: list[LabPod], count: int
    ) -> tuple[int, int]:
        """Wait until connections reach exactly these pods, then check and log their shares; return the bounds."""
        self.settle(prober, target, pods)
        result = prober.tcp(target, count)
        self.log(label, f"{count} connections: {result}")
        return expect_balanced(result, pods)

    def inspect(self, node: str, command: str, cause: str, code: int = 0) -> None:
        """Run a pykubeproxy command on a node; expect its exit code and the cause in its output, and log both."""
        self._expect_answer(
            f"on {node}", f"pykubeproxy {command}", run_on_node(self.lab, node, command), cause, code
        )

    def inspect_cluster(self, command: str, cause: str, code: int = 0) -> None:
        """Run a command of kubectl's plugin; expect its exit code and the cause in its output, and log both."""
        answer = run_plugin(self.lab, command)
        self._expect_answer("from outside", f"kubectl pykubeproxy {command}", answer, cause, code)

    def _expect_answer(self, label: str, command: str, answer: CommandAnswer, cause: str, code: int) -> None:
        found = answer.code == code and cause in answer.text
        expect(found, f"{cause!r} from {command}, exit code {code}", answer)
        self.log(label, command)
        self.log("", f"→ {cause}")


@dataclass(frozen=True)
class Scenario:
    """A demonstration that starts in an empty cluster and may leave anything behind.

    `why` names the rule behind the result, `command` shows it on a node.
    """

    name: str
    title: str
    description: str
    why: str
    command: str
    function: Callable[[Run], None]

    def run(self, lab: Lab, log: Log) -> None:
        """Run in an empty lab; raises ScenarioFailed."""
        self.function(Run(lab, log))


def scenario(
    title: str, *, why: str, command: str = "pykubeproxy dump-rules default/web"
) -> Callable[[Callable[[Run], None]], Scenario]:
    """Make a Scenario of a function: its name is the scenario's, its docstring the description."""

    def decorate(function: Callable[[Run], None]) -> Scenario:
        name = getattr(function, "__name__", "").replace("_", "-")
        return Scenario(name, title, function.__doc__ or "", why, command, function)

    return decorate


def expect_balanced(result: ProbeResult, pods: list[LabPod]) -> tuple[int, int]:
    """Expect an answer for each connection, and an equal share for each pod within the bounds, which it returns."""
    expect_pods(result, pods)
    low, high = bounds(result.total, 1 / len(pods))
    in_bounds = all(low <= count <= high for count in result.pods.values())
    expect(in_bounds, f"{low} to {high} connections for each pod", result)
    return low, high


def expect_pods(result: ProbeResult, pods: Iterable[LabPod]) -> None:
    """Expect an answer for each connection, from each of these pods and no other."""
    answered = not result.failed and set(result.pods) == names(pods)
    expect(answered, f"answers from {', '.join(sorted(names(pods)))} only", result)


def expect_errors(result: ProbeResult, error: str) -> None:
    expect(set(result.errors) == {error} and not result.pods, f"{error} for every connection", result)


def bounds(tries: int, probability: float) -> tuple[int, int]:
    """Return the lowest and highest plausible count of successes.

    A count outside has a probability of at most FALSE_ALARM / 2 on either side, by the binomial distribution.
    """
    chances = [
        math.comb(tries, count) * probability**count * (1 - probability) ** (tries - count)
        for count in range(tries + 1)
    ]

    def first_plausible(chances: list[float]) -> int:
        return sum(below <= FALSE_ALARM / 2 for below in itertools.accumulate(chances))

    return first_plausible(chances), tries - first_plausible(chances[::-1])
