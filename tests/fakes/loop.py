"""The agent's reconcile loop on a test clock, with scripted messages and tables in memory."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from pykubeproxy.agent.loop import Agent
from pykubeproxy.agent.mailbox import Mailbox, Message, Stop
from pykubeproxy.agent.notices import Notice
from pykubeproxy.agent.observe.events import Recorder
from pykubeproxy.agent.pending import Budget
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.config import Config, load
from pykubeproxy.kernel import Backend, Failed, KernelError
from pykubeproxy.objects import Family, Kind, Listed, Node
from pykubeproxy.rules import names
from pykubeproxy.rules.context import KernelFacts
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.ports import PortName
from tests.fakes.iptables import FakeIptables
from tests.objects import service, slice_of
from tests.strategies import NODE

HERE = Node(NODE, ("192.168.99.10",), ("10.244.1.0/24",), "zone-a")
WEB = ChainKey("nat", names.cluster_chain(PortName("ns", "web", "http", "TCP")))
LISTS: tuple[Message, ...] = (
    Listed(Kind.SERVICE, (service(),)),
    Listed(Kind.ENDPOINT_SLICE, (slice_of("10.244.1.5"),)),
)
STOP = Stop(0, "SIGTERM")
BROKEN = Failed("iptables-restore", 1, "out of order")


_N = TypeVar("_N")


class Clock:
    """A clock that advances only while the agent waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ScriptedMailbox(Mailbox):
    """Delivers messages and runs functions at set times, in seconds since the start."""

    def __init__(self, clock: Clock, *steps: tuple[float, object]) -> None:
        super().__init__()
        self._test_clock = clock
        self._start = clock.now
        self._steps = sorted(steps, key=lambda step: step[0])
        self.waits = 0

    def take(self, seconds: float) -> list[Message]:
        self.waits += 1
        assert self.waits < 2000, "the agent never comes to rest"
        until = self._test_clock.now + max(seconds, 0.0)
        due = self._start + self._steps[0][0]
        self._test_clock.now = max(self._test_clock.now, min(until, due))
        messages: list[Message] = []
        while self._steps and self._start + self._steps[0][0] <= self._test_clock.now:
            _, step = self._steps.pop(0)
            if callable(step):
                step()
            else:
                messages.append(step)  # type: ignore[arg-type]
        return messages


class FakeFamily:
    """A family with tables in memory; `facts_error`, if set, is raised when facts are read."""

    def __init__(self, family: Family = Family.IPV4) -> None:
        self.live = FakeIptables(family=family)
        self.progress: Callable[[], None] = lambda: None
        self.limit(None)
        self.facts_error: KernelError | None = None

    def limit(self, budget: Budget | None) -> None:
        """Begin anew; let each sync do no more than this."""
        self.tables = FamilyTables(self.live, 200, budget, lambda: self.progress())

    def facts(self, with_addresses: bool) -> KernelFacts:
        if self.facts_error:
            raise self.facts_error
        return KernelFacts(("192.168.99.10",))

    def rules(self, key: ChainKey) -> tuple[str, ...]:
        return self.live.save().chains.get(key, ())


def config(**fields: object) -> Config:
    kind = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
    return load({**kind, "clusterCIDR": "10.244.0.0/16", **fields}, {}).config


class Loop:
    """The reconcile loop of some families, of IPv4 by default, on a clock that begins at 1000 s."""

    def __init__(self, *families: FakeFamily) -> None:
        self.families = families or (FakeFamily(),)
        self.family = self.families[0]
        self.live = self.family.live
        self.rules = self.family.rules
        self.clock = Clock()
        self.waits = 0
        # What the observers were told, and its kinds among the calls of the heartbeat: "progress" and "idle".
        self.notices: list[Notice] = []
        self.trail: list[str] = []
        self.on_notice: Callable[[Notice], None] = lambda _: None
        self.recorder, self.retried_listeners = Recorder(NODE), 0
        for family in self.families:
            family.progress = self.progress

    def notice(self, notice: Notice) -> None:
        self.notices.append(notice)
        self.trail.append(type(notice).__name__)
        self.on_notice(notice)

    def told(self, kind: type[_N]) -> list[_N]:
        """Return the notices of a kind."""
        return [notice for notice in self.notices if isinstance(notice, kind)]

    def retry_listeners(self) -> None:
        self.retried_listeners += 1

    def progress(self) -> None:
        self.trail.append("progress")

    def idle(self) -> None:
        self.trail.append("idle")

    @property
    def now(self) -> float:
        """The time since the start."""
        return self.clock.now - 1000

    def break_(self) -> None:
        self.live.failure = BROKEN

    def repair(self) -> None:
        self.live.failure = None

    def break_facts(self) -> None:
        self.family.facts_error = BROKEN

    def repair_facts(self) -> None:
        self.family.facts_error = None

    def run(
        self,
        *steps: tuple[float, object],
        settings: Config | None = None,
        mailbox: type[ScriptedMailbox] | None = None,
        **options: Any,
    ) -> int:
        """Run an agent until it stops; return its exit status."""
        script = (mailbox or ScriptedMailbox)(self.clock, *steps)
        unsupported = {} if len(self.families) == 2 else {Family.IPV6: "no ip6tables"}
        families = SimpleNamespace(
            backend=Backend.NFT, opened=self.families, unsupported=unsupported, watch=None
        )
        # This object is both the observers and the heartbeat.
        arguments = (settings or config(), NODE, families, script, self, self)
        status = Agent(*arguments, clock=self.clock, **options).run()  # type: ignore[arg-type]
        self.waits = script.waits
        return status


def at(time: float, *messages: Message) -> list[tuple[float, object]]:
    return [(time, message) for message in messages]


STARTED = [*at(1, *LISTS, Listed(Kind.NODE, (HERE,)))]
