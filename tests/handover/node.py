"""The node under test: its pods, which never stop, its agents, and the changes of its Services."""

import random
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from pykubeproxy.kernel import Backend, Iptables, Runner, open_iptables
from pykubeproxy.lab.agents import Agent, node_environment
from pykubeproxy.lab.api import Object
from pykubeproxy.lab.apiserver.write import merged
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import SITES, Namespace
from pykubeproxy.lab.pods import Pod
from pykubeproxy.objects import Family
from pykubeproxy.rules.ownership import is_ours
from tests.fakes.crowd import Crowd
from tests.handover import services
from tests.handover.services import NODE, Source

_POD = Path(__file__).with_name("pod.py")
_CROWD = 240  # Services; above 200 addresses, dispatch=auto makes a tree
_CHANGING = range(_CROWD, _CROWD + 40)


class Node:
    """Node1 of a lab. `agent` runs after `start`; `backend` and `settings` are for the next start."""

    def __init__(self, lab: Lab, backend: Backend, seed: int) -> None:
        self.lab, self.backend = lab, backend
        self.settings: Object = {}
        network = lab.network
        for cidr, via in zip(services.EXTERNAL_CIDRS, SITES[NODE].addresses, strict=True):
            network.fabric.route(cidr, via=via)
        for address in services.CLIENT_CROWD_V6:
            network.client.address("eth0", address, 64)
        self.pods = [_start(lab, f"pod{number}", node) for number, node in enumerate([*SITES, *SITES])]
        self.caller = _start(lab, "caller", NODE)
        for pod in (*self.pods, self.caller):
            pod.wait_answering()
        services.create(lab.api, self.pods)
        self.crowd = Crowd(lab.api, [pod.addresses for pod in self.pods], stride=2, both=5)
        self.crowd.create(range(_CROWD))
        self.agent = lab.agents[NODE]
        (logs := lab.logs / "second").mkdir()
        self._spare = Agent(self.agent.node, logs, lab.api.url, {"iptables": {"minSyncPeriod": "200ms"}})
        self._seed = seed
        self._created: set[int] = set()

    @property
    def namespace(self) -> Namespace:
        """The node's namespace."""
        return self.agent.node

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of programs on the node."""
        return node_environment(self.lab.logs, NODE)

    def namespaces(self) -> dict[Source, Namespace]:
        """Return the namespaces of the clients."""
        return {
            Source.OUTSIDE: self.lab.network.client,
            Source.POD: self.caller.namespace,
            Source.ENDPOINT: self.pods[0].namespace,
            Source.HOST: self.namespace,
        }

    def routes(self) -> list[services.Route]:
        """Return the routes of the clients."""
        return services.routes(self.caller, self.pods[0])

    def tables(self, family: Family, backend: Backend | None = None) -> Iptables:
        """Return the node's tables."""
        runner = Runner(
            ("ip", "netns", "exec", self.namespace.name),
            {"XTABLES_LOCKFILE": self.environment["XTABLES_LOCKFILE"]},
        )
        return open_iptables(backend or self.backend, family, runner)

    def has_rules(self, backend: Backend) -> bool:
        """Return whether the tables of a backend have chains of a service proxy."""
        tables = [self.tables(family, backend) for family in Family]
        return any(
            is_ours(key)
            for it in tables
            if backend is Backend.NFT or it.legacy_tables()
            for key in it.save().chains
        )

    def start(self) -> None:
        """Start the agent and wait for its first sync."""
        self.launch()
        self.wait_for("rules in place")

    def launch(self) -> None:
        """Start the agent without waiting."""
        self._begun = len(self.agent.log())
        backend = {"pykubeproxy": {"iptablesBackend": self.backend.value}}
        self.agent.start(merged(self.settings, backend))

    def wait_for(self, event: str) -> None:
        """Wait until the agent has logged an event since its start."""
        self.lab.until(lambda: event in self.agent.log()[self._begun :], event)

    def swap(self) -> Agent:
        """Make the spare agent the node's; return the one it replaces."""
        self.agent, self._spare = self._spare, self.agent
        return self._spare

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change Services and endpoints all the time."""
        ended = Event()

        def change() -> None:
            chance = random.Random(self._seed)
            while not ended.wait(chance.uniform(0.0, 0.3)):
                self._change(chance)

        with ThreadPoolExecutor(1) as other:
            changes = other.submit(change)
            try:
                yield
            finally:
                ended.set()
            changes.result()

    def _change(self, chance: random.Random) -> None:
        """Change the endpoints of a Service, or create and delete others."""
        if chance.random() < 0.7:
            some = chance.sample(self.pods, chance.randrange(1, len(self.pods) + 1))
            # The policy Local needs an endpoint on the node; an endpoint that connects to itself is among them.
            chosen = {pod.name: pod for pod in (self.pods[chance.choice((0, 2))], *some)}
            services.set_endpoints(self.lab.api, chance.choice(services.CHANGING), list(chosen.values()))
            return
        number = chance.choice(_CHANGING)
        write = self.crowd.delete if number in self._created else self.crowd.create
        write(range(number, number + 1))
        self._created ^= {number}


def _start(lab: Lab, name: str, node: str) -> Pod:
    return lab.start_pod(name, name, node, [sys.executable, "-I", "-S", str(_POD), name])
