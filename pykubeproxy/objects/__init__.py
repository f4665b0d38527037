"""The fields of Service, EndpointSlice and Node that decide about rules, decoded once and checked.

Pure: bytes or parsed JSON come in, frozen values go out. Nothing unchecked leaves this room: every name, address and
port in these values is safe to stand in a rule.
"""

from pykubeproxy.objects.decode import Undecodable, decode
from pykubeproxy.objects.events import Deleted, Event, Listed, Updated
from pykubeproxy.objects.values import (
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Family,
    Key,
    Kind,
    Node,
    Object,
    Port,
    Protocol,
    Refused,
    Service,
    address_and_port,
    family_of,
    remark,
)

__all__ = [
    "Deleted",
    "Endpoint",
    "EndpointPort",
    "EndpointSlice",
    "Event",
    "Family",
    "Key",
    "Kind",
    "Listed",
    "Node",
    "Object",
    "Port",
    "Protocol",
    "Refused",
    "Service",
    "Undecodable",
    "Updated",
    "address_and_port",
    "decode",
    "family_of",
    "remark",
]
