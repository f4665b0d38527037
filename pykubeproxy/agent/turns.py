"""Who is next: service ports that wait, in turns of their namespaces."""

from collections.abc import Collection, Iterator

from pykubeproxy.agent.wanted import Wanted
from pykubeproxy.objects import Key
from pykubeproxy.services.ports import PortName


class Turns:
    """Service ports that wait for a turn. The namespace comes first whose last turn is longest ago, or that is new.

    `has_new`: a Service has come since the last turn.
    """

    def __init__(self) -> None:
        self._ports: dict[Key, dict[PortName, None]] = {}
        # When each waiting namespace had its last turn, as the number of that turn.
        self._taken: dict[str, int] = {}
        self._turns = 0
        self.has_new = False

    def __len__(self) -> int:
        return sum(map(len, self._ports.values()))

    def __bool__(self) -> bool:
        return bool(self._ports)

    def services(self) -> Collection[Key]:
        """Return the Services with waiting ports."""
        return self._ports.keys()

    def add(self, service: Key, ports: Collection[PortName]) -> None:
        """Let these ports wait, behind others of their Service."""
        if ports:
            self.has_new = self.has_new or service not in self._ports
            self._ports[service] = {**self._ports.get(service, {}), **dict.fromkeys(ports)}

    def take(self, wanted: Wanted, pairs: int) -> frozenset[PortName]:
        """Return the ports whose turn it is: at least one, with about so many pairs at most. They stay until `keep`.

        They are of the namespace that comes first, and as many whole Services of those that follow as fit. If they fail,
        they must not keep others waiting: others of their Service and of their namespace come first the next time.
        """
        turn = frozenset(self._fitting(wanted, float(pairs)))
        self._turns += 1
        waiting = {key.namespace for key in self._ports}
        self._taken = {namespace: n for namespace, n in self._taken.items() if namespace in waiting}
        self._taken |= {name.namespace: self._turns for name in turn}
        services = {name.service_key for name in turn}
        for key in [key for key in self._ports if key in services]:
            self._ports[key] = dict.fromkeys(sorted(self._ports.pop(key), key=turn.__contains__))
        self.has_new = False
        return turn

    def keep(self, services: Collection[Key], ports: Collection[PortName]) -> None:
        """Remove the ports of these Services, except these."""
        for key in self._ports.keys() & services:
            left = {name: None for name in self._ports[key] if name in ports}
            if left:
                self._ports[key] = left
            else:
                del self._ports[key]

    def _fitting(self, wanted: Wanted, left: float) -> Iterator[PortName]:
        namespaces = dict.fromkeys(key.namespace for key in self._ports)
        by_turn = sorted(namespaces, key=lambda namespace: self._taken.get(namespace, 0))
        order = {namespace: n for n, namespace in enumerate(by_turn)}
        first: PortName | None = None
        for key in sorted(self._ports, key=lambda key: order[key.namespace]):
            ports = self._ports[key]
            each = wanted.cost(key) / max(1, len(wanted.port_names(key)))
            if first and key.namespace != first.namespace and left < each * len(ports):
                return
            for name in ports:
                if first and left < each:
                    return
                first = first or name
                left -= each
                yield name
