"""A soak test: changes, faults and traffic together, and the checks at its end."""

import os
import random
import statistics
import subprocess
import sys
import time

from pykubeproxy.lab.agents import COMMAND, node_environment
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.objects import Family
from tests.fakes.traffic import Failure, Traffic
from tests.soak.actions import choose
from tests.soak.node import SoakNode, difference

# Megabytes that the memory of a never-stopped agent may grow between a third of the time and the end.
GROWTH = 8.0


def soak(backend: str, seed: int, seconds: float) -> list[str]:
    """Run the test on one backend, print its progress, and return the problems found."""
    chance = random.Random(seed)
    print(f"{backend}: seed {seed}, {seconds:.0f} s", flush=True)
    settings = {"logging": {"verbosity": 2}, "pykubeproxy": {"iptablesBackend": backend}}
    with Lab(
        f"soak{backend}{os.getpid()}",
        backend=backend,
        settings=settings,
        agents=False,
        api_server="tests.fakes.faulty_apiserver",
    ) as lab:
        lab.timeout = 60.0
        node = SoakNode(lab)
        node.quiet()
        with Traffic(node.stage.routes()) as traffic:
            memory = _run_actions(node, chance, seconds)
            node.quiet()
        print(traffic)
        return [*_judge_traffic(node, traffic), *_judge_memory(memory), *_judge_rules(node)]


def _run_actions(node: SoakNode, chance: random.Random, seconds: float) -> list[float]:
    """Run actions until the time is up; return the memory of node2's agent after each, in MB."""
    begun = time.monotonic()
    memory = []
    while (now := time.monotonic() - begun) < seconds:
        action = choose(chance)
        words = action(node, chance)
        had = node.memory()
        memory.append(had["node2"])
        shown = " ".join(f"{name} {megabytes:.1f} MB" for name, megabytes in had.items())
        print(f"{now:6.1f} s  {action.__name__}: {words} [{shown}]", flush=True)
        time.sleep(chance.uniform(0.0, 0.8))
    return memory


def _judge_traffic(node: SoakNode, traffic: Traffic) -> list[str]:
    failures = [(name, it) for name, found in traffic.failures().items() for it in found]
    ours = [(name, it) for name, it in failures if not _excused(node, it)]
    print(f"{traffic.total()} responses; failed: {len(ours)}, during external writes: ", end="")
    print(len(failures) - len(ours))
    slow = [it for seen in traffic.seen.values() for it in seen.slow]
    print(
        f"slow responses: {[it.how for it in slow if not _excused(node, it)]}, with external writes: {len(slow)}"
    )
    if node.repairs:
        worst, median = max(node.repairs), statistics.median(node.repairs)
        print(f"{len(node.repairs)} repairs: median {median:.2f} s, worst {worst:.2f} s")
    return [f"{name} failed: {it.how}, from {it.begun:.2f} to {it.noticed:.2f}" for name, it in ours]


def _excused(node: SoakNode, failure: Failure) -> bool:
    return any(begun <= failure.noticed and failure.begun <= ended for begun, ended in node.excused)


def _judge_memory(memory: list[float]) -> list[str]:
    early, late = memory[len(memory) // 3], statistics.median(memory[-3:])
    print(f"memory of the agent on node2: {memory[0]:.1f}, {early:.1f}, {late:.1f} MB")
    return [f"memory grew from {early:.1f} to {late:.1f} MB"] if late > early + GROWTH else []


def _judge_rules(node: SoakNode) -> list[str]:
    """Check that the rules equal those that a new agent writes into empty tables."""
    before = {family: node.rules(family) for family in Family}
    node.stage.agent.stop()
    with node.stage.lab.nodes["node1"].namespace.entered():
        environment = node_environment(node.stage.lab.logs, "node1")
        subprocess.run([*COMMAND, "cleanup"], check=True, env=environment, stdout=subprocess.DEVNULL)
    emptied = [family for family in Family if node.rules(family) == before[family]]
    node.start()
    node.until(node.stage.is_synced, "the rules are in place again")
    node.quiet()
    after = {family: node.rules(family) for family in Family}
    different = [family for family in Family if after[family] != before[family]]
    print("rules equal to those of a fresh start:", "no" if different else "yes")
    return [
        *(f"{it.value} differs from a fresh start: {difference(after[it], before[it])}" for it in different),
        *(f"cleanup removed nothing from {it.value}" for it in emptied),
    ]


def new_seed() -> int:
    """Return a random seed."""
    return random.SystemRandom().randrange(1 << 32)


def report(problems: list[str]) -> int:
    """Print the problems and return the exit status."""
    for problem in problems:
        print(f"FAIL: {problem}", file=sys.stderr)
    print("soak: failed" if problems else "soak: passed")
    return 1 if problems else 0
