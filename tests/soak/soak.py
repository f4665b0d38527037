"""A soak test: changes, faults and traffic on one node together, and the checks at its end."""

import fcntl
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import urllib3

from pykubeproxy.kernel import Backend, Runner, open_iptables
from pykubeproxy.lab.agents import COMMAND, node_environment
from pykubeproxy.lab.api import SLICES, Object, in_namespace
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.objects import Family
from pykubeproxy.rules import names
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey
from tests.cases import comparable
from tests.fakes.faulty_apiserver import Order
from tests.fakes.process import megabytes
from tests.fakes.traffic import NAMESPACE, Crowd, Failure, Traffic, TrafficRoute, echo_command

CROWD = 150
_MARKER = CROWD  # a Service created and deleted to see that all earlier changes have arrived
# Seconds; longer than the agents wait between two syncs.
LONGEST_PAUSE = 0.8

_STICKY = ["10.96.0.50", "fd00:10:96::50"]

Interval = tuple[float, float]
Rules = dict[ChainKey, list[str]]


def _dispatch(mode: str, **settings: object) -> Object:
    """Return agent settings with this dispatch mode."""
    return {"pykubeproxy": {"dispatch": mode}, **settings}


def difference(before: Rules, after: Rules) -> str:
    """Describe the differences, chain by chain."""
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return "; ".join(f"{key.table} {key.chain}: {before.get(key)} is {after.get(key)}" for key in keys)


class SoakNode:
    """Node1 of a lab with its agent, tables and Services; node2's agent is never stopped.

    default/web and default/sticky have three pods on both nodes.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab, self.agent = lab, lab.agents["node1"]
        pods = [
            lab.start_pod(f"web-{number}", "web", f"node{number % 2 + 1}", echo_command(f"web-{number}"))
            for number in range(3)
        ]
        for pod in pods:
            pod.wait_answering()
        (self._client_pod,) = lab.deploy("caller", 1, nodes=["node1"])
        self._web = lab.service("web", type="NodePort")
        affinity = {"sessionAffinity": "ClientIP", "clusterIP": _STICKY[0], "clusterIPs": _STICKY}
        self._sticky = lab.service("sticky", selector={"app": "web"}, **affinity)
        self.crowd = Crowd(lab.api, [pod.addresses for pod in pods], stride=2, both=5)
        self.settings: Object = _dispatch("flat")
        self.present: set[int] = set()
        self.excused: list[Interval] = []
        self.repairs: list[float] = []
        self._environment = node_environment(lab.logs, "node1")
        runner = Runner(
            ("ip", "netns", "exec", lab.nodes["node1"].namespace.name),
            {"XTABLES_LOCKFILE": self._environment["XTABLES_LOCKFILE"]},
        )
        self.tables = {family: open_iptables(Backend(lab.backend), family, runner) for family in Family}
        lab.agents["node2"].start()
        self.start()

    def routes(self) -> list[TrafficRoute]:
        """Return connections from a pod of the node and from outside, over both families."""
        pod, client = self._client_pod.namespace.entered, self.lab.outside.namespace.entered
        outside = self.lab.nodes["node1"]
        return [
            TrafficRoute("cluster IP", self._web.vip(4), pod),
            TrafficRoute("cluster IP, IPv6", self._web.vip(6), pod),
            TrafficRoute("affinity", self._sticky.vip(4), pod, affine=True),
            TrafficRoute("node port", outside.node_port(self._web, 4), client),
            TrafficRoute("node port, IPv6", outside.node_port(self._web, 6), client),
        ]

    def start(self) -> None:
        """Start or restart node1's agent."""
        if self.agent.pid:
            self.agent.stop()
        self._logged = len(self.agent.log())
        self.agent.start(self.settings)

    def is_synced(self) -> bool:
        """Return whether the agent has synced since its start."""
        return "rules in place" in self.agent.log()[self._logged :]

    def create(self, numbers: Sequence[int]) -> None:
        """Create these Services."""
        for number in numbers:
            self.crowd.create(range(number, number + 1))
        self.present.update(numbers)

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete these Services."""
        for number in numbers:
            self.crowd.delete(range(number, number + 1))
        self.present.difference_update(numbers)

    def order(self, order: Order) -> None:
        """Inject a fault into the API server; `drop` closes the connection of this request, too."""
        with suppress(urllib3.exceptions.ProtocolError):
            self.lab.api.call("POST", "/_lab/faults", msgspec.to_builtins(order))

    def quiet(self) -> None:
        """End all faults and wait until the tables show all changes, including a last marker Service."""
        self.order(Order("clear"))
        self.until(self.is_synced, "the rules are in place")
        self.create([_MARKER])
        self.until(lambda: self._served() == self.present, "exactly the existing Services are served")
        self.delete([_MARKER])
        self.until(lambda: self._served() == self.present, "deleted Services are no longer served")
        self.until(self._is_still, "the agent stops writing")

    def _served(self) -> set[int]:
        nat = self.tables[Family.IPV4].save(["nat"]).chains
        return {
            number
            for number in (*range(CROWD), _MARKER)
            if ChainKey("nat", names.cluster_chain(self.crowd.port_name(number))) in nat
        }

    def _is_still(self) -> bool:
        before = [self.rules(family) for family in Family]
        time.sleep(LONGEST_PAUSE)
        return before == [self.rules(family) for family in Family]

    def rules(self, family: Family) -> Rules:
        """Return the live rules of a family in comparable form."""
        return comparable(self.tables[family].save(["filter", "nat"]))

    def comes_back(self, family: Family, before: Rules) -> None:
        """Wait until the rules are as before. Raise TimeoutError with the differences."""
        try:
            self.until(lambda: self.rules(family) == before, "the rules are back")
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {difference(before, self.rules(family))}") from None

    def iptables(self, family: Family, *arguments: str) -> None:
        """Run an external iptables command on node1."""
        program = "iptables" if family is Family.IPV4 else "ip6tables"
        command = [f"{program}-{self.lab.backend}", "-w", *arguments]
        self.run(command)

    def run(self, command: Sequence[str]) -> None:
        """Run a command on node1."""
        with self.lab.nodes["node1"].namespace.entered():
            subprocess.run(command, check=True, env=self._environment, stdout=subprocess.DEVNULL)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the legacy tables."""
        with Path(self._environment["XTABLES_LOCKFILE"]).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds. Raise TimeoutError after a minute."""
        self.lab.until(condition, what)

    def memory(self) -> dict[str, float]:
        """Return the resident memory of each agent in MB."""
        agents = self.lab.agents.items()
        return {name: megabytes(agent.pid) for name, agent in agents if agent.pid}


_DISCOVERY = "/apis/discovery.k8s.io"


def churn(node: SoakNode, chance: random.Random) -> str:
    """Create and delete some Services and change the endpoints of others."""
    absent = [number for number in range(CROWD) if number not in node.present]
    come = chance.sample(absent, min(len(absent), chance.randrange(1, 20)))
    go = chance.sample(sorted(node.present), min(len(node.present), chance.randrange(0, 20)))
    node.create(come)
    node.delete(go)
    changed = chance.sample(sorted(node.present), min(len(node.present), 5))
    for number in changed:
        endpoints = [{"addresses": [pod[0]], "conditions": {"ready": True}} for pod in node.crowd.pods]
        some = chance.sample(endpoints, chance.randrange(1, len(endpoints) + 1))
        path = f"{in_namespace(SLICES, NAMESPACE)}/s{number:04}-ipv4"
        node.lab.api.call("PATCH", path, {"endpoints": some})
    return f"Services: {len(come)} created, {len(go)} deleted, {len(changed)} changed, {len(node.present)} in total"


def restart(node: SoakNode, chance: random.Random) -> str:
    """Stop the agent with SIGTERM and start a new one."""
    node.start()
    return "agent restarted"


def kill(node: SoakNode, chance: random.Random) -> str:
    """Kill the agent with SIGKILL at a random moment and start a new one."""
    words = churn(node, chance)
    time.sleep(chance.uniform(0.0, 0.6))
    node.agent.kill()
    time.sleep(chance.uniform(0.0, 0.5))
    node.start()
    return f"{words}; agent killed and started"


def reconfigure(node: SoakNode, chance: random.Random) -> str:
    """Change the dispatch mode or settings that affect all rules."""
    node.settings = chance.choice(
        [
            _dispatch("flat"),
            _dispatch("tree"),
            _dispatch("tree", iptables={"masqueradeAll": True, "minSyncPeriod": "200ms"}),
            _dispatch("flat", iptables={"minSyncPeriod": "500ms"}),
        ]
    )
    node.start()
    return f"configured: {node.settings}"


def api_fault(node: SoakNode, chance: random.Random) -> str:
    """Inject a fault into the API server; `quiet` ends it."""
    watch: dict[str, object] = {"verb": "watch"}
    orders = cast(
        "list[dict[str, Any]]",
        chance.choice(
            [
                [{"do": "drop"}],
                [{"do": "compact"}, {"do": "end-watches"}],
                *[
                    [{"do": "error", "status": status, "times": 1000, **watch}, {"do": "end-watches"}]
                    for status in (401, 403, 410, 500, 503)
                ],
                [
                    {"do": "error", "status": 429, "retry_after": 1, "times": 1000, **watch},
                    {"do": "end-watches"},
                ],
                [{"do": "delay", "seconds": 0.7, **watch}, {"do": "end-watches"}],
                [{"do": "truncate", "times": 1000, **watch}, {"do": "end-watches"}],
                [{"do": "echo", **watch}, {"do": "end-watches"}],
                [
                    {"do": "error", "times": 9, "verb": "list", "path": _DISCOVERY},
                    {"do": "compact"},
                    {"do": "drop"},
                ],
            ]
        ),
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
        node.agent.kill()
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


def _actions(chance: random.Random) -> Iterator[Action]:
    """Yield each action once in random order, then random ones without end."""
    yield from chance.sample(list(ACTIONS), len(ACTIONS))
    while True:
        yield from chance.choices(list(ACTIONS), list(ACTIONS.values()))


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
        with Traffic(node.routes()) as traffic:
            memory = _run_actions(node, chance, seconds)
            node.quiet()
        print(traffic)
        return [*_judge_traffic(node, traffic), *_judge_memory(memory), *_judge_rules(node)]


def _run_actions(node: SoakNode, chance: random.Random, seconds: float) -> list[float]:
    """Run actions until the time is up; return the memory of node2's agent after each, in MB."""
    begun, now = time.monotonic(), 0.0
    memory: list[float] = []
    for action in _actions(chance):
        if len(memory) >= len(ACTIONS) and now >= seconds:
            break
        words = action(node, chance)
        had = node.memory()
        memory.append(had["node2"])
        shown = " ".join(f"{name} {megabytes:.1f} MB" for name, megabytes in had.items())
        print(f"{now:6.1f} s  {action.__name__}: {words} [{shown}]", flush=True)
        time.sleep(chance.uniform(0.0, 0.8))
        now = time.monotonic() - begun
    return memory


def _judge_traffic(node: SoakNode, traffic: Traffic) -> list[str]:
    failures = [(name, item) for name, found in traffic.failures().items() for item in found]
    ours = [(name, item) for name, item in failures if not _excused(node, item)]
    print(f"{traffic.total()} responses; failed: {len(ours)}, during external writes: ", end="")
    print(len(failures) - len(ours))
    slow = [item for seen in traffic.seen.values() for item in seen.slow]
    print(
        f"slow responses: {[item.how for item in slow if not _excused(node, item)]}, with external writes: {len(slow)}"
    )
    if node.repairs:
        worst, median = max(node.repairs), statistics.median(node.repairs)
        print(f"{len(node.repairs)} repairs: median {median:.2f} s, worst {worst:.2f} s")
    return [f"{name} failed: {item.how}, from {item.begun:.2f} to {item.noticed:.2f}" for name, item in ours]


def _excused(node: SoakNode, failure: Failure) -> bool:
    return any(begun <= failure.noticed and failure.begun <= ended for begun, ended in node.excused)


def _judge_memory(memory: list[float]) -> list[str]:
    early, late = memory[len(memory) // 3], statistics.median(memory[-3:])
    print(f"memory of the agent on node2: {memory[0]:.1f}, {early:.1f}, {late:.1f} MB")
    return [f"memory grew from {early:.1f} to {late:.1f} MB"] if late > early + GROWTH else []


def _judge_rules(node: SoakNode) -> list[str]:
    """Check that the rules equal those that a new agent writes into empty tables."""
    before = {family: node.rules(family) for family in Family}
    node.agent.stop()
    node.run([*COMMAND, "cleanup"])
    emptied = [family for family in Family if node.rules(family) == before[family]]
    node.start()
    node.until(node.is_synced, "the rules are in place again")
    node.quiet()
    after = {family: node.rules(family) for family in Family}
    different = [family for family in Family if after[family] != before[family]]
    print("rules equal to those of a fresh start:", "no" if different else "yes")
    return [
        *(
            f"{item.value} differs from a fresh start: {difference(after[item], before[item])}"
            for item in different
        ),
        *(f"cleanup removed nothing from {item.value}" for item in emptied),
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
