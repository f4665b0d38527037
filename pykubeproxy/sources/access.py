"""What an API server lets a proxy do, asked of the server itself; nothing is created by it."""

import msgspec

from pykubeproxy.objects import Node
from pykubeproxy.sources.api import Timing, api_watches
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Failure
from pykubeproxy.sources.watch import SourceError

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_TIMEOUT = 10.0  # seconds


class Right(msgspec.Struct, frozen=True):
    """A verb on objects of a kind, such as "list" on "endpointslices" of group "discovery.k8s.io"."""

    verb: str
    resource: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


NEEDED = tuple(
    Right(verb, resource, group)
    for resource, group in (("services", ""), ("endpointslices", "discovery.k8s.io"), ("nodes", ""))
    for verb in ("list", "watch")
)
"""What a proxy cannot do without."""
EVENTS = Right("create", "events", "events.k8s.io")
"""What it tells of its troubles by."""


class Access(msgspec.Struct, frozen=True):
    """What was found out.

    `trouble` is why this node could not be looked for, "" if it could; `node` then is None if there is no such Node.
    `denied` are the rights that are not granted; `unknown` is why that cannot be told, "" if it could be.
    """

    server: str
    trouble: str
    node: Node | None
    denied: tuple[Right, ...] = ()
    unknown: str = ""


def access(client: Client, node_name: str) -> Access:
    """Look for the Node, and ask for each right that a proxy needs whether it is granted; takes eight requests."""
    trouble, node = "", None
    try:
        *_, nodes = api_watches(client, node_name, Timing(answer=_TIMEOUT))
        found = (it for listed in nodes.once() for it in listed.objects)
        node = next((it for it in found if isinstance(it, Node)), None)
    except SourceError as error:
        trouble = str(error)
    try:
        denied = tuple(right for right in (*NEEDED, EVENTS) if not _granted(client, right))
    except Failure as failure:
        return Access(client.server, trouble, node, unknown=str(failure))
    return Access(client.server, trouble, node, denied)


class _Status(msgspec.Struct):
    allowed: bool = False


class _Review(msgspec.Struct):
    status: _Status


def _granted(client: Client, right: Right) -> bool:
    """Raises Failure."""
    attributes = {"verb": right.verb, "resource": right.resource, "group": right.group}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = client.post(_REVIEWS, body, asked="access reviews", idle=_TIMEOUT)
    try:
        return msgspec.json.decode(answer, type=_Review).status.allowed
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server's answer to an access review cannot be read: {error}") from None
