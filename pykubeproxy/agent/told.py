"""What an agent tells of the objects that it works from, for `pykubeproxy explain` and for completion: the page /servicez."""

import msgspec

import pykubeproxy
from pykubeproxy import API_VERSION
from pykubeproxy.objects import EndpointSlice, Node, Service


class Objects(msgspec.Struct, frozen=True):
    """Services of a name with their EndpointSlices; or all Services there are, without those. And this agent's Node."""

    node: Node
    services: tuple[Service, ...] = ()
    slices: tuple[EndpointSlice, ...] = ()


class Told(msgspec.Struct, frozen=True, rename="camel"):
    """The objects, and the configuration they are served by, as a file of it.

    Between programs of one version only: it holds the objects as this version keeps them.
    """

    objects: Objects
    config: str
    api_version: str = API_VERSION
    version: str = pykubeproxy.__version__


class _Versions(msgspec.Struct, rename="camel"):
    api_version: str
    version: str


def encode(told: Told) -> bytes:
    """As JSON."""
    return msgspec.json.encode(told)


def decode(text: bytes) -> Told:
    """Read what `encode` wrote. Raises ValueError, with what is wrong, for other text and other versions."""
    by = msgspec.json.decode(text, type=_Versions)
    if (by.api_version, by.version) != (API_VERSION, pykubeproxy.__version__):
        raise ValueError(f"it is of version {by.version}, and this is {pykubeproxy.__version__}")
    return msgspec.json.decode(text, type=Told)
