"""Encode the page /servicez: the objects of an agent, for commands such as `pykubeproxy explain`."""

from collections.abc import Iterator

import msgspec

import pykubeproxy
from pykubeproxy import API_VERSION
from pykubeproxy.agent.quarantine.quarantined import Quarantined
from pykubeproxy.objects import EndpointSlice, Node, Service, check
from pykubeproxy.services.ports import ApiServers

# The longest configuration that `decode` accepts, in characters.
_LONGEST_CONFIG = 1 << 17
# The size of a piece of a document, in bytes.
_PIECE = 1 << 16


class Objects(msgspec.Struct, frozen=True, omit_defaults=True):
    """The Node of an agent, some of its Services and their quarantined ports; EndpointSlices only on request.

    `api_servers` are the addresses at which the agent reaches its API servers.
    """

    node: Node
    services: tuple[Service, ...] = ()
    slices: tuple[EndpointSlice, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    api_servers: ApiServers = frozenset()


class ObjectDocument(msgspec.Struct, frozen=True, rename="camel"):
    """The objects, and the configuration as the text of a file.

    Only programs of the same version can exchange it: its form follows the objects of this version.
    """

    objects: Objects
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


def _check_values(objects: Objects) -> None:
    """Raise Invalid for an address, a network or a port from which no rule can be made."""
    addresses = [
        *objects.node.addresses,
        *(address for address, _ in objects.api_servers),
        *(
            it
            for one in objects.services
            for it in (*one.cluster_ips, *one.external_ips, *one.load_balancer_ips)
        ),
        *(it.address for slice_ in objects.slices for it in slice_.endpoints if it.address),
    ]
    for address in addresses:
        check.address(address, "an address")
    for network in (*objects.node.pod_cidrs, *(it for one in objects.services for it in one.source_ranges)):
        check.cidr(network, "a network")
    for port in (it for one in objects.services for it in one.ports):
        check.port(port.port, "a port")
        check.port(port.node_port, "a node port")
