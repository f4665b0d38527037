"""An event recorder that keeps its events, and observers with it."""

from pykubeproxy.agent.observe.events import KubernetesEvent, Recorder
from pykubeproxy.agent.observe.health import Health
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.config import Config
from pykubeproxy.objects import Family


class FakeRecorder(Recorder):
    """`events` are in the order of recording; `closed` is set by `close`."""

    def __init__(self, node_name: str = "node1") -> None:
        super().__init__(node_name)
        self.events: list[KubernetesEvent] = []
        self.closed = False

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.events]

    def record(self, event: KubernetesEvent) -> None:
        """Keep an event."""
        assert not self.closed
        self.events.append(event)

    def close(self, seconds: float) -> None:
        """Mark as closed."""
        self.closed = True


def observers(config: Config, recorder: Recorder, *families: Family, needs_node: bool = True) -> Observers:
    """Return the observers of an agent that serves these families, by default both."""
    served = families or tuple(Family)
    health = Health(served, config.iptables.sync_period, needs_node)
    return Observers(config, served, recorder, health, Metrics(families=served))
