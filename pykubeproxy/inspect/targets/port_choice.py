"""Choose the port of a Service or a pod that a target names."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from pykubeproxy.inspect.targets.parse import Target
from pykubeproxy.inspect.targets.places import Unresolved
from pykubeproxy.objects import EndpointPort, Port, Protocol, Service
from pykubeproxy.objects.pods import Pod
from pykubeproxy.wording import listed

# How many ports an error names.
_MOST_PORTS = 6

_AnyPort = TypeVar("_AnyPort", Port, EndpointPort)


def choose_service_port(service: Service, target: Target, protocol: Protocol | None) -> Port:
    """Return the port of a Service that a target and a protocol name; without a port, the only one.

    Raises Unresolved, with the ports to choose from.
    """
    if not service.ports:
        raise Unresolved(f"{target.without_port} has no ports, so nothing is served; check its spec.ports")
    try:
        return _choose(service.ports, target, protocol)
    except _NoPort:
        for port in service.ports:
            if target.port == str(port.node_port):
                raise Unresolved(
                    f"{target.port} is the node port of {target.without_port}; use node/NAME:{target.port}, or"
                    f" {target.without_port}:{port.name or port.port}"
                ) from None
        raise


def choose_pod_port(pod: Pod | None, target: Target, protocol: Protocol | None) -> tuple[int, Protocol]:
    """Return the number and protocol of a pod's port; a number may be one that the Pod does not declare.

    The protocol of such a port is TCP by default. Raises Unresolved.
    """
    ports = pod.ports if pod else ()
    number = int(target.port) if target.port.isdecimal() else 0
    if number and not any(port.port == number for port in ports):
        return number, protocol or Protocol.TCP
    if not ports:
        raise Unresolved(f"{target.without_port} declares no ports; use {target.without_port}:NUMBER")
    if number and protocol and not any(port.port == number and port.protocol is protocol for port in ports):
        # A declaration is only information: the process may listen with both protocols.
        return number, protocol
    chosen = _choose(ports, target, protocol)
    assert chosen.port is not None, "ports without a number are left out"
    return chosen.port, chosen.protocol


class _NoPort(Unresolved):
    """No port has the name or number."""


def _choose(ports: Sequence[_AnyPort], target: Target, protocol: Protocol | None) -> _AnyPort:
    named = [port for port in ports if _is(port, target.port)] if target.port else list(ports)
    if not named:
        raise _NoPort(f"{target.without_port} has no port {target.port}; it has {_names(ports)}")
    matching = [port for port in named if protocol in (None, port.protocol)]
    if not matching:
        assert protocol is not None, "a protocol filters"
        others = " and ".join(dict.fromkeys(port.protocol.value for port in named))
        what = f"port {target.port} of {target.without_port}" if target.port else str(target)
        raise Unresolved(f"{what} has protocol {others}, not {protocol.value}; remove --proto")
    if len(matching) > 1:
        first = matching[0]
        raise Unresolved(
            f"{target} has several ports: {_names(matching)}; name one, such as"
            f" {target.without_port}:{first.name or first.port}"
            + (" --proto " + (first.protocol.value.lower()) if _same_names(matching) else "")
        )
    return matching[0]


def _is(port: Port | EndpointPort, text: str) -> bool:
    return text in (port.name, str(port.port))


def _same_names(ports: Iterable[Port | EndpointPort]) -> bool:
    names = [port.name or str(port.port) for port in ports]
    return len(set(names)) < len(names)


def _names(ports: Sequence[Port | EndpointPort]) -> str:
    """Such as "http (80/TCP) and 9090/UDP"."""

    def text(port: Port | EndpointPort) -> str:
        number = f"{port.port}/{port.protocol.value}"
        return f"{port.name} ({number})" if port.name else number

    return listed(map(text, ports), _MOST_PORTS)
