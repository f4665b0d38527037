"""A soak: churn, faults and traffic together, and what has to hold at its end."""

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
from tests.soak.deeds import choose
from tests.soak.world import World, difference

# How much more memory an agent that has run all the time may have at the end than after a third of it, in MB.
GROWTH = 8.0


def soak(backend: str, seed: int, seconds: float) -> list[str]:
    """Do it on one backend, telling on standard output how it goes; returns all that is not as it should be."""
    chance = random.Random(seed)
    print(f"{backend}: seed {seed}, {seconds:.0f} s", flush=True)
    settings = {"logging": {"verbosity": 2}, "pykubeproxy": {"iptablesBackend": backend}}
    with Lab(f"soak{backend}{os.getpid()}", backend=backend, settings=settings, agents=False) as lab:
        lab.patience = 60.0
        world = World(lab)
        world.quiet()
        with Traffic(world.stage.ways()) as traffic:
            memory = _keep_at_it(world, chance, seconds)
            world.quiet()
        print(traffic)
        return [*_judge_traffic(world, traffic), *_judge_memory(memory), *_judge_rules(world)]


def _keep_at_it(world: World, chance: random.Random, seconds: float) -> list[float]:
    """One deed after the other until the time is up; returns what the agent of node2 had of memory after each."""
    begun = time.monotonic()
    memory = []
    while (now := time.monotonic() - begun) < seconds:
        deed = choose(chance)
        words = deed(world, chance)
        had = world.memory()
        memory.append(had["node2"])
        shown = " ".join(f"{name} {megabytes:.1f} MB" for name, megabytes in had.items())
        print(f"{now:6.1f} s  {deed.__name__}: {words} [{shown}]", flush=True)
        time.sleep(chance.uniform(0.0, 0.8))
    return memory


def _judge_traffic(world: World, traffic: Traffic) -> list[str]:
    failures = [(name, it) for name, found in traffic.failures().items() for it in found]
    ours = [(name, it) for name, it in failures if not _excused(world, it)]
    print(f"{traffic.total()} answers; failed: {len(ours)}, and while others had taken rules away: ", end="")
    print(len(failures) - len(ours))
    slow = [it for seen in traffic.seen.values() for it in seen.slow]
    print(f"slow answers: {[it.how for it in slow if not _excused(world, it)]}, and meanwhile: {len(slow)}")
    if world.repairs:
        worst, median = max(world.repairs), statistics.median(world.repairs)
        print(f"{len(world.repairs)} repairs: median {median:.2f} s, worst {worst:.2f} s")
    return [f"{name} failed: {it.how}, from {it.begun:.2f} to {it.noticed:.2f}" for name, it in ours]


def _excused(world: World, failure: Failure) -> bool:
    return any(begun <= failure.noticed and failure.begun <= ended for begun, ended in world.excused)


def _judge_memory(memory: list[float]) -> list[str]:
    early, late = memory[len(memory) // 3], statistics.median(memory[-3:])
    print(f"memory of an agent that was never stopped: {memory[0]:.1f}, {early:.1f}, {late:.1f} MB")
    return [f"memory grew from {early:.1f} to {late:.1f} MB"] if late > early + GROWTH else []


def _judge_rules(world: World) -> list[str]:
    """Whether the rules are those that a new agent writes into empty tables."""
    before = {family: world.rules(family) for family in Family}
    world.stage.agent.stop()
    with world.stage.lab.nodes["node1"].namespace.entered():
        environment = node_environment(world.stage.lab.logs, "node1")
        subprocess.run([*COMMAND, "cleanup"], check=True, env=environment, stdout=subprocess.DEVNULL)
    emptied = [family for family in Family if world.rules(family) == before[family]]
    world.start()
    world.until(world.stage.is_in_place, "the rules are in place again")
    world.quiet()
    after = {family: world.rules(family) for family in Family}
    different = [family for family in Family if after[family] != before[family]]
    print("rules equal to those of a fresh start:", "no" if different else "yes")
    return [
        *(f"{it.value} differs from a fresh start: {difference(after[it], before[it])}" for it in different),
        *(f"cleanup left all of {it.value}" for it in emptied),
    ]


def new_seed() -> int:
    """A seed nobody has chosen."""
    return random.SystemRandom().randrange(1 << 32)


def report(problems: list[str]) -> int:
    """Tell of what was wrong; returns the exit status."""
    for problem in problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    print("soak: failed" if problems else "soak: all is well")
    return 1 if problems else 0
