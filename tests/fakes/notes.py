"""A recorder of events that keeps what it is told."""

from pykubeproxy.agent.observe.events import KubernetesEvent, Recorder


class Notes(Recorder):
    """`events` in the order they came; `closed` once nothing more is to come."""

    def __init__(self) -> None:
        self.events: list[KubernetesEvent] = []
        self.closed = False

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.events]

    def record(self, event: KubernetesEvent) -> None:
        """Keep it."""
        assert not self.closed
        self.events.append(event)

    def close(self, seconds: float) -> None:
        """There is nothing to wait for."""
        self.closed = True
