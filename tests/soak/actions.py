"""Actions on a node in a soak test: on its Services, agent, API server and tables."""

import random
import time
from collections.abc import Callable
from typing import NamedTuple

from pykubeproxy.lab.api import SLICES, in_namespace
from pykubeproxy.objects import Family
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey
from tests.fakes.crowd import NAMESPACE
from tests.fakes.faulty_apiserver import Order
from tests.fakes.stage import dispatch_settings
from tests.soak.node import SoakNode

_DISCOVERY = "/apis/discovery.k8s.io"


def churn(node: SoakNode, chance: random.Random) -> str:
    """Create and delete some Services and change the endpoints of others."""
    absent = [number for number in node.numbers if number not in node.present]
    come = chance.sample(absent, min(len(absent), chance.randrange(1, 20)))
    go = chance.sample(sorted(node.present), min(len(node.present), chance.randrange(0, 20)))
    node.create(come)
    node.delete(go)
    changed = chance.sample(sorted(node.present), min(len(node.present), 5))
    for number in changed:
        endpoints = [{"addresses": [pod[0]], "conditions": {"ready": True}} for pod in node.stage.crowd.pods]
        some = chance.sample(endpoints, chance.randrange(1, len(endpoints) + 1))
        path = f"{in_namespace(SLICES, NAMESPACE)}/s{number:04}-ipv4"
        node.stage.lab.api.call("PATCH", path, {"endpoints": some})
    return f"Services: {len(come)} created, {len(go)} deleted, {len(changed)} changed, {len(node.present)} in total"


def restart(node: SoakNode, chance: random.Random) -> str:
    """Stop the agent with SIGTERM and start a new one."""
    node.start()
    return "agent restarted"


def kill(node: SoakNode, chance: random.Random) -> str:
    """Kill the agent with SIGKILL at a random moment and start a new one."""
    words = churn(node, chance)
    time.sleep(chance.uniform(0.0, 0.6))
    node.stage.agent.kill()
    time.sleep(chance.uniform(0.0, 0.5))
    node.start()
    return f"{words}; agent killed and started"


def reconfigure(node: SoakNode, chance: random.Random) -> str:
    """Change the dispatch mode or settings that affect all rules."""
    node.settings = chance.choice(
        [
            dispatch_settings("flat"),
            dispatch_settings("tree"),
            dispatch_settings("tree", iptables={"masqueradeAll": True, "minSyncPeriod": "200ms"}),
            dispatch_settings("flat", iptables={"minSyncPeriod": "500ms"}),
        ]
    )
    node.start()
    return f"configured: {node.settings}"


def api_fault(node: SoakNode, chance: random.Random) -> str:
    """Inject a fault into the API server; `quiet` ends it."""
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
        node.order(Order(**order))
    return f"API server: {', '.join(str(order) for order in orders)}"


def lock(node: SoakNode, chance: random.Random) -> str:
    """Hold the lock of the legacy tables while Services change."""
    seconds = chance.uniform(0.2, 2.5)
    with node.locked():
        words = churn(node, chance)
        time.sleep(seconds)
    return f"lock held for {seconds:.1f} s: {words}"


class Change(NamedTuple):
    """An external write to the tables of one family: its description and iptables commands."""

    what: str
    commands: list[list[str]]


def changes(node: SoakNode, family: Family, chance: random.Random) -> list[Change]:
    """Return the possible external writes to a family's live tables."""
    live = node.tables[family].save().chains
    # Foreign rules in KUBE-FIREWALL stay.
    ours = [key for key, rules in live.items() if is_ours(key) and rules]
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
        Change(f"a rule deleted from {chain.chain}", [["-t", chain.table, "-D", chain.chain, number]]),
        Change(f"a rule added to {chain.chain}", [["-t", chain.table, "-I", chain.chain, "-j", "RETURN"]]),
        Change(
            f"a jump deleted from {built_in.chain}",
            [["-t", built_in.table, "-D", built_in.chain, str(place)]],
        ),
        Change(f"chain {chain.chain} flushed", [["-t", chain.table, "-F", chain.chain]]),
        Change("chain KUBE-SERVICES flushed", [["-t", served.table, "-F", served.chain]]),
        Change("table nat flushed", [["-t", "nat", "-F"]]),
        Change("table filter flushed", [["-t", "filter", "-F"]]),
        Change("all tables flushed", [["-t", table, "-F"] for table in ("mangle", "filter", "nat")]),
    ]


def external_write(node: SoakNode, chance: random.Random) -> str:
    """Change the agent's rules from outside in a quiet phase and measure the time until they are repaired.

    Connections that fail in this interval are counted separately.
    """
    node.quiet()
    family = chance.choice(list(Family))
    change = chance.choice(changes(node, family, chance))
    stopped = chance.random() < 0.2
    before = node.rules(family)
    begun = time.monotonic()
    if stopped:
        node.stage.agent.kill()
    for command in change.commands:
        node.iptables(family, *command)
    if stopped:
        node.start()
    print(f"          {change.what}", flush=True)
    node.comes_back(family, before)
    seconds = time.monotonic() - begun
    node.excused.append((begun, begun + seconds))
    if not stopped:
        node.repairs.append(seconds)
    return f"{family.value}: {change.what}{', while the agent was stopped' if stopped else ''}: repaired after {seconds:.2f} s"


Action = Callable[[SoakNode, random.Random], str]
#: Relative frequencies.
ACTIONS: dict[Action, int] = {
    churn: 6,
    restart: 1,
    kill: 3,
    reconfigure: 2,
    api_fault: 5,
    lock: 1,
    external_write: 4,
}


def choose(chance: random.Random) -> Action:
    """Choose an action at random."""
    return chance.choices(list(ACTIONS), list(ACTIONS.values()))[0]
