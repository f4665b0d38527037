"""What is done to a node in a soak: to its Services, its agent, its API server and its tables."""

import random
import time
from collections.abc import Callable
from typing import NamedTuple

from pykubeproxy.lab.api import SLICES, in_namespace
from pykubeproxy.lab.apiserver.faults import Order
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey
from tests.fakes.crowd import NAMESPACE
from tests.fakes.stage import dispatched
from tests.soak.world import World

_DISCOVERY = "/apis/discovery.k8s.io"


def churn(world: World, chance: random.Random) -> str:
    """Some Services come, some go, and of some the endpoints."""
    absent = [number for number in world.numbers if number not in world.present]
    come = chance.sample(absent, min(len(absent), chance.randrange(1, 20)))
    go = chance.sample(sorted(world.present), min(len(world.present), chance.randrange(0, 20)))
    world.create(come)
    world.delete(go)
    changed = chance.sample(sorted(world.present), min(len(world.present), 5))
    for number in changed:
        endpoints = [{"addresses": [pod[0]], "conditions": {"ready": True}} for pod in world.stage.crowd.pods]
        some = chance.sample(endpoints, chance.randrange(1, len(endpoints) + 1))
        path = f"{in_namespace(SLICES, NAMESPACE)}/s{number:04}-ipv4"
        world.stage.lab.api.call("PATCH", path, {"endpoints": some})
    return (
        f"{len(come)} Services came, {len(go)} went, {len(changed)} changed; {len(world.present)} are there"
    )


def restart(world: World, chance: random.Random) -> str:
    """SIGTERM, and a new agent."""
    world.start()
    return "started anew"


def kill(world: World, chance: random.Random) -> str:
    """SIGKILL at any moment, and a new agent a little later."""
    words = churn(world, chance)
    time.sleep(chance.uniform(0.0, 0.6))
    world.stage.agent.kill()
    time.sleep(chance.uniform(0.0, 0.5))
    world.start()
    return f"{words}; killed and started"


def reconfigure(world: World, chance: random.Random) -> str:
    """Another way to find Services, or other terms for all their rules."""
    world.settings = chance.choice(
        [
            dispatched("flat"),
            dispatched("tree"),
            dispatched("tree", iptables={"masqueradeAll": True, "minSyncPeriod": "200ms"}),
            dispatched("flat", iptables={"minSyncPeriod": "500ms"}),
        ]
    )
    world.stage.agent.configure(world.settings)
    return f"configured: {world.settings}"


def api_fault(world: World, chance: random.Random) -> str:
    """The API server goes wrong for what comes next; `quiet` ends that."""
    watch: dict[str, object] = {"verb": "watch"}
    orders = chance.choice(
        [
            [{"do": "drop"}],
            [{"do": "freeze-watches"}],
            [{"do": "compact"}, {"do": "end-watches"}],
            *[
                [{"do": "error", "status": status, "times": 1000, **watch}, {"do": "end-watches"}]
                for status in (401, 403, 410, 500, 503)
            ],
            [{"do": "error", "status": 429, "retry_after": 1, "times": 1000, **watch}, {"do": "end-watches"}],
            [{"do": "delay", "seconds": 0.7, **watch}, {"do": "end-watches"}],
            [{"do": "truncate", "times": 1000, **watch}, {"do": "end-watches"}],
            [{"do": "echo", **watch}, {"do": "end-watches"}],
            [
                {"do": "error", "times": 9, "verb": "list", "path": _DISCOVERY},
                {"do": "compact"},
                {"do": "drop"},
            ],
        ]
    )
    for order in orders:
        world.order(Order(**order))
    return f"API server: {', '.join(str(order) for order in orders)}"


def lock(world: World, chance: random.Random) -> str:
    """The lock of the legacy tables is held for a while, in which things change."""
    seconds = chance.uniform(0.2, 2.5)
    with world.locked():
        words = churn(world, chance)
        time.sleep(seconds)
    return f"lock held for {seconds:.1f} s: {words}"


class Blow(NamedTuple):
    """Something that a foreign hand does to the tables of one family: iptables commands, and what it is called."""

    what: str
    commands: list[list[str]]


def blows(world: World, family: Family, chance: random.Random) -> list[Blow]:
    """All that may be done to a family's tables as they are."""
    live = world.tables[family].save().chains
    ours = [key for key, rules in live.items() if key.chain.startswith("KUBE-") and rules]
    jumps = [
        (key, number)
        for key, rules in live.items()
        if not key.chain.startswith("KUBE-")
        for number, rule in enumerate(rules, 1)
        if "-j KUBE-" in rule
    ]
    chain, (built_in, place) = chance.choice(ours), chance.choice(jumps)
    number = str(chance.randrange(1, len(live[chain]) + 1))
    served = next(key for key in ours if key == ChainKey("nat", "KUBE-SERVICES"))
    return [
        Blow(f"a rule deleted from {chain.chain}", [["-t", chain.table, "-D", chain.chain, number]]),
        Blow(f"a rule added to {chain.chain}", [["-t", chain.table, "-I", chain.chain, "-j", "RETURN"]]),
        Blow(
            f"a jump deleted from {built_in.chain}",
            [["-t", built_in.table, "-D", built_in.chain, str(place)]],
        ),
        Blow(f"chain {chain.chain} flushed", [["-t", chain.table, "-F", chain.chain]]),
        Blow("chain KUBE-SERVICES flushed", [["-t", served.table, "-F", served.chain]]),
        Blow("table nat flushed", [["-t", "nat", "-F"]]),
        Blow("table filter flushed", [["-t", "filter", "-F"]]),
        Blow("all tables flushed", [["-t", table, "-F"] for table in ("mangle", "filter", "nat")]),
    ]


def foreign_hand(world: World, chance: random.Random) -> str:
    """Somebody else changes our rules while all is quiet; how long they take to come back is measured.

    Connections that fail meanwhile are counted apart: our rules are not there to serve them.
    """
    world.quiet()
    family = chance.choice(list(Family))
    blow = chance.choice(blows(world, family, chance))
    away = chance.random() < 0.2
    before = world.rules(family)
    begun = time.monotonic()
    if away:
        world.stage.agent.kill()
    for command in blow.commands:
        world.iptables(family, *command)
    if away:
        world.start()
    print(f"          {blow.what}", flush=True)
    world.comes_back(family, before)
    seconds = time.monotonic() - begun
    world.excused.append((begun, begun + seconds))
    if not away:
        world.repairs.append(seconds)
    return f"{family.value}: {blow.what}{', while the agent was away' if away else ''}: back after {seconds:.2f} s"


Deed = Callable[[World, random.Random], str]
#: Each with how often it comes, compared with the others.
DEEDS: dict[Deed, int] = {
    churn: 6,
    restart: 1,
    kill: 3,
    reconfigure: 2,
    api_fault: 5,
    lock: 1,
    foreign_hand: 4,
}


def choose(chance: random.Random) -> Deed:
    """One of them."""
    return chance.choices(list(DEEDS), list(DEEDS.values()))[0]
