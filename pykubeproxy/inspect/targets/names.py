"""The names of the addresses of a connection, for output."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from pykubeproxy.inspect.targets.directory import Directory
from pykubeproxy.inspect.targets.parse import TargetKind
from pykubeproxy.inspect.targets.places import Place
from pykubeproxy.inspect.targets.resolve import ResolvedConnection
from pykubeproxy.objects import address_and_port


class Names(msgspec.Struct, frozen=True):
    """What addresses of a connection are, as far as known.

    - `source`, `destination`: such as "pod/default/client" and "svc/default/web:http", "" if unknown
    - `pods`: by address of an endpoint, such as "pod/default/web-1"
    - `resolved`: a line for each end that the user named: "svc/default/web:http is cluster IP 10.96.0.10:80"
    """

    source: str = ""
    destination: str = ""
    pods: Mapping[str, str] = {}
    resolved: tuple[str, ...] = ()


def names_of(connection: ResolvedConnection, directory: Directory, endpoints: Iterable[str]) -> Names:
    """Return the names of a connection's ends, and of the pods at the addresses of endpoints."""
    pods = ((address, directory.pod_at(address)) for address in endpoints)
    server = connection.server
    return Names(
        source=_name(connection.client),
        destination=f"svc/{connection.service}" if connection.service else _name(server) if server else "",
        pods={address: f"pod/{pod.key}" for address, pod in pods if pod},
        resolved=tuple(_resolved(connection)),
    )


def _name(place: Place) -> str:
    if place.target.kind is not TargetKind.ADDRESS:
        return place.target.without_port
    if place.pod:
        return f"pod/{place.pod.key}"
    # An address in the pod CIDR of a node is not the node's.
    return f"node/{place.node}" if place.is_node else ""


def _resolved(connection: ResolvedConnection) -> Iterator[str]:
    client, server = connection.client, connection.server
    if client.target.kind is not TargetKind.ADDRESS:
        yield f"{client.target} is {connection.source}{_on_node(client)}"
    if server and server.target.kind is not TargetKind.ADDRESS:
        of = f", node port of svc/{connection.service}" if connection.service else ""
        at = address_and_port(connection.destination, connection.port)
        yield f"{server.target} is {at}{_on_node(server)}{of}"
    elif not server:
        yield f"svc/{connection.service} is {connection.frontend}"


def _on_node(place: Place) -> str:
    return f" on node {place.node}" if place.pod and place.node else ""
