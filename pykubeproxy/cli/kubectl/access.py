"""The API server and the nodes that the plugin's options name."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pykubeproxy.cli.kubectl.options import Connection, NodeNames, Reading
from pykubeproxy.objects import Node
from pykubeproxy.remote import NodeAccess
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import Client


def open_client(connection: Connection) -> Client:
    """Return a client of the API server. Raises ClickException."""
    raise NotImplementedError


def namespace_of(connection: Connection) -> str:
    """Return -n, else the namespace of the context, else "default"."""
    raise NotImplementedError


def list_nodes(client: Client, nodes: NodeNames) -> Sequence[Node]:
    """Return these Nodes, ordered by name. Raises ClickException if one does not exist."""
    raise NotImplementedError


def list_objects(client: Client) -> Cluster:
    """Return all Services, EndpointSlices and Nodes. Raises ClickException."""
    raise NotImplementedError


@contextmanager
def node_access(client: Client, reading: Reading) -> Iterator[NodeAccess]:
    """Provide the access to nodes; remove debug pods at the end."""
    yield NodeAccess(client, reading.pod_selector, reading.debug_image)
