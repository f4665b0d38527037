"""An event recorder that keeps its events."""

from pykubeproxy.agent.observe.events import KubernetesEvent, Recorder


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
