"""The page /servicez: which objects an agent works from, for `pykubeproxy explain` and for completion."""

import msgspec

import pykubeproxy
from pykubeproxy import API_VERSION
from pykubeproxy.objects import EndpointSlice, Node, Service
from pykubeproxy.services.ports import PortName

# No configuration is longer, in characters; to read one takes its time.
_LONGEST_CONFIG = 1 << 17


class QuarantinedPort(msgspec.Struct, frozen=True):
    """A service port whose rules iptables refuses, in a family such as "IPv4", and iptables' words."""

    family: str
    name: PortName
    why: str


class Objects(msgspec.Struct, frozen=True):
    """Services of a name with their EndpointSlices; or all Services there are, without those. And this agent's Node.

    `set_aside` are service ports of these Services that are not served.
    """

    node: Node
    services: tuple[Service, ...] = ()
    slices: tuple[EndpointSlice, ...] = ()
    set_aside: tuple[QuarantinedPort, ...] = ()


class ObjectDocument(msgspec.Struct, frozen=True, rename="camel"):
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


def encode(told: ObjectDocument) -> bytes:
    """As JSON."""
    return msgspec.json.encode(told)


def decode(text: bytes) -> ObjectDocument:
    """Read what `encode` wrote. Raises ValueError, with what is wrong, for other text and other versions.

    What is read has the right types, and is not checked any further: it is to be shown, not to be programmed.
    """
    try:
        by = msgspec.json.decode(text, type=_Versions)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if (by.api_version, by.version) != (API_VERSION, pykubeproxy.__version__):
        raise ValueError(f"it is of version {by.version}, and this is {pykubeproxy.__version__}")
    told = msgspec.json.decode(text, type=ObjectDocument)
    if len(told.config) > _LONGEST_CONFIG:
        raise ValueError(f"its configuration is longer than {_LONGEST_CONFIG} characters")
    return told
