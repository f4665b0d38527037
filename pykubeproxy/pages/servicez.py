"""The objects of an agent: the page /servicez, for commands such as `pykubeproxy explain`."""

from collections.abc import Iterator
from typing import Self

import msgspec

import pykubeproxy
from pykubeproxy import API_VERSION
from pykubeproxy.objects import EndpointSlice, Family, Node, Service, check
from pykubeproxy.services.ports import ApiServers, PortName

# The longest configuration that `decode` accepts, in characters.
_LONGEST_CONFIG = 1 << 17
# The size of a piece of a document, in bytes.
_PIECE = 1 << 16


class Quarantined(msgspec.Struct, frozen=True, rename="camel"):
    """A service port that is not served, or a whole Service that is too large.

    - `family`: "IPv4" or "IPv6"
    - `name`: the name of the Service
    - `port`: the name of the port; "" for a whole Service, or without one
    - `protocol`: of the port; "" for a whole Service
    - `reason`: why it is not served
    - `since`: since when, in seconds since 1970
    - `rejects_clients`: new connections are rejected, for a whole Service those to its cluster IP; if false, iptables
      rejects even the reject rule, and packets pass unchanged
    """

    family: str
    namespace: str
    name: str
    port: str
    protocol: str
    reason: str
    since: float
    rejects_clients: bool

    @classmethod
    def from_port(
        cls,
        family: Family,
        port: PortName,
        reason: str,
        since: float,
        rejects_clients: bool = True,
    ) -> Self:
        """Return the quarantine of a service port in one family."""
        return cls(
            family=family.value,
            namespace=port.namespace,
            name=port.service,
            port=port.port,
            protocol=port.protocol,
            reason=reason,
            since=since,
            rejects_clients=rejects_clients,
        )

    @property
    def port_name(self) -> PortName:
        """The service port; its str() is the name used in rules and logs."""
        return PortName(self.namespace, self.name, self.port, self.protocol)


class NodeObjects(msgspec.Struct, frozen=True, omit_defaults=True):
    """The objects from which an agent makes its rules.

    - `node`: its Node
    - `services`: the Services that the client asks for
    - `slices`: their EndpointSlices, only on request
    - `quarantined`: their service ports that are not served
    - `api_servers`: the addresses at which the agent reaches its API servers
    """

    node: Node
    services: tuple[Service, ...] = ()
    slices: tuple[EndpointSlice, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    api_servers: ApiServers = frozenset()


class ObjectDocument(msgspec.Struct, frozen=True, rename="camel"):
    """The page /servicez. Only programs of one version exchange it, since its form follows their objects.

    - `objects`: the objects, with the names of fields as in Python
    - `config`: the configuration, as the text of a file
    - `api_version`, `version`: of this document and of pykubeproxy
    """

    objects: NodeObjects
    config: str
    api_version: str = API_VERSION
    version: str = pykubeproxy.__version__


class _Versions(msgspec.Struct, rename="camel"):
    api_version: str
    version: str


def encode(document: ObjectDocument) -> bytes:
    """Return the document as JSON."""
    return msgspec.json.encode(document)


def pieces(document: ObjectDocument) -> Iterator[bytes]:
    """Yield the document as JSON in pieces: with many large EndpointSlices, it has hundreds of megabytes."""
    objects, head = document.objects, b'{"objects":{'
    others = msgspec.structs.replace(objects, services=(), slices=())  # which the text omits
    text = bytearray(head)
    for name, items in (("services", objects.services), ("slices", objects.slices)):
        text += f'"{name}":['.encode()
        for number, item in enumerate(items):
            text += b"," * (number > 0) + msgspec.json.encode(item)
            if len(text) >= _PIECE:
                yield bytes(text)
                text.clear()
        text += b"],"
    yield bytes(text + encode(msgspec.structs.replace(document, objects=others)).removeprefix(head))


def decode(text: bytes) -> ObjectDocument:
    """Read the output of `encode`. Raises ValueError for any other text or version.

    Types, addresses, networks and ports are checked, other values are not: display the result, do not program it.
    """
    try:
        versions = msgspec.json.decode(text, type=_Versions)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if (versions.api_version, versions.version) != (API_VERSION, pykubeproxy.__version__):
        raise ValueError(f"its version is {versions.version}, this is {pykubeproxy.__version__}")
    document = msgspec.json.decode(text, type=ObjectDocument)
    if len(document.config) > _LONGEST_CONFIG:
        raise ValueError(f"its configuration is longer than {_LONGEST_CONFIG} characters")
    _check_values(document.objects)
    return document


def _check_values(objects: NodeObjects) -> None:
    """Raise Invalid for an address, a network or a port from which no rule can be made."""
    addresses = [
        *objects.node.addresses,
        *(address for address, _ in objects.api_servers),
        *(
            address
            for one in objects.services
            for address in (*one.cluster_ips, *one.external_ips, *one.load_balancer_ips)
        ),
        *(endpoint.address for slice_ in objects.slices for endpoint in slice_.endpoints if endpoint.address),
    ]
    for address in addresses:
        check.address(address, "an address")
    for network in (
        *objects.node.pod_cidrs,
        *(network for one in objects.services for network in one.source_ranges),
    ):
        check.cidr(network, "a network")
    for port in (port for one in objects.services for port in one.ports):
        check.port(port.port, "a port")
        check.port(port.node_port, "a node port")
