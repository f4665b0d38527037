"""Ask an API server which permissions the proxy has, without creating anything on it."""

import msgspec

from pykubeproxy.objects import Node
from pykubeproxy.sources.api import Timing, api_watches
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Failure, Forbidden
from pykubeproxy.sources.watch import SourceError

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_TIMEOUT = 10.0  # seconds


class Permission(msgspec.Struct, frozen=True):
    """A verb on a resource, such as "list" on "endpointslices" of group "discovery.k8s.io"."""

    verb: str
    resource: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


NEEDED = tuple(
    Permission(verb, resource, group)
    for resource, group in (("services", ""), ("endpointslices", "discovery.k8s.io"), ("nodes", ""))
    for verb in ("list", "watch")
)
"""The permissions a proxy needs."""
EVENTS = Permission("create", "events", "events.k8s.io")
"""The permission to create events."""


class Access(msgspec.Struct, frozen=True):
    """The Node object and the missing permissions.

    `node_error` is why listing the Node failed, or ""; `node` is None if it does not exist. `review_error` is why the
    permissions are unknown, or "". `answers` is False if the server answers neither request, or accepts no credentials.
    `verified` is False if the kubeconfig disables the verification of the server.
    """

    server: str
    node_error: str
    node: Node | None
    denied: tuple[Permission, ...] = ()
    review_error: str = ""
    answers: bool = True
    verified: bool = True


def access(client: Client, node_name: str) -> Access:
    """List the Node and review each permission that a proxy needs, in eight requests."""
    node_error, node = "", None
    try:
        *_, nodes = api_watches(client, node_name, Timing(answer=_TIMEOUT))
        (listed,) = nodes.once()
        node = next((node for node in listed.objects if isinstance(node, Node)), None)
    except SourceError as error:
        node_error = str(error)
    denied: tuple[Permission, ...] = ()
    review_error, answers = "", True
    try:
        denied = tuple(permission for permission in (*NEEDED, EVENTS) if not _is_granted(client, permission))
    except Failure as failure:
        review_error = str(failure)
        answers = not node_error or isinstance(failure, Forbidden)
    return Access(client.server, node_error, node, denied, review_error, answers, client.verifies_server)


class _ReviewStatus(msgspec.Struct):
    allowed: bool = False


class _Review(msgspec.Struct):
    status: _ReviewStatus


def _is_granted(client: Client, permission: Permission) -> bool:
    """Return whether the server grants the permission. Raises Failure."""
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": msgspec.structs.asdict(permission)},
    }
    review = client.post(_REVIEWS, body, resource="access reviews", idle=_TIMEOUT)
    try:
        return msgspec.json.decode(review, type=_Review).status.allowed
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent an invalid access review: {error}") from None
