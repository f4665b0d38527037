"""Decode and validate the fields of Service, EndpointSlice and Node that rules depend on.

Pure: JSON comes in, frozen values go out. Every name, address and port in these values is safe to write into a rule.
"""

from pykubeproxy.objects.decode import IDENTITY_BYTES, ObjectMeta, Undecodable, decode, object_meta
from pykubeproxy.objects.values import (
    Deleted,
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Event,
    Family,
    Key,
    Kind,
    Listed,
    Node,
    Object,
    Port,
    Protocol,
    Service,
    Updated,
    address_and_port,
    family_of,
    of_family,
    rejection_warning,
)
