"""The API server and the nodes that the plugin's options name."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import click

from pykubeproxy.cli import logs
from pykubeproxy.cli.kubectl.arguments import NodeSelection, PodOptions, ServerOptions
from pykubeproxy.cli.terminal import click_errors, echo_line, progress
from pykubeproxy.config import LogFormat
from pykubeproxy.objects import Kind, Node
from pykubeproxy.remote import DebugPods, NodeAccess, side_by_side
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import Client, ListForbidden, SourceError, all_objects, list_kind
from pykubeproxy.sources.kubeconfig_files import context_namespace, user_kubeconfigs

_Result = TypeVar("_Result")

# Requests per second, as for kubectl.
_QPS, _BURST = 50.0, 300
GRANTS = "manifests/inspect/rbac.yaml grants what is needed"


@click_errors(SourceError)
def open_client(server: ServerOptions) -> Client:
    """Return a client of the API server, and send log lines to standard error. Raises ClickException."""
    logs.set_up(LogFormat.TEXT)
    kubeconfigs = user_kubeconfigs(server.kubeconfig, server.context, os.environ)
    return Client(kubeconfigs or "", qps=_QPS, burst=_BURST)


@click_errors(SourceError)
def namespace_of(server: ServerOptions, namespace: str) -> str:
    """Return `namespace`, else the namespace of the context, else "default". Raises ClickException."""
    if namespace:
        return namespace
    kubeconfigs = user_kubeconfigs(server.kubeconfig, server.context, os.environ)
    return (context_namespace(kubeconfigs) if kubeconfigs else "") or "default"


@contextmanager
def listing() -> Iterator[None]:
    """Raise ClickException for what lists raise, with the permissions if one is missing. Works as a decorator too."""
    try:
        yield
    except ListForbidden as error:
        raise click.ClickException(f"{error}; {GRANTS}") from None
    except SourceError as error:
        raise click.ClickException(str(error)) from None


@listing()
def list_nodes(client: Client, wanted: NodeSelection) -> Sequence[Node]:
    """Return these Nodes, ordered by name. Raises ClickException if one does not exist."""
    nodes = {it.name: it for it in list_kind(client, Kind.NODE).objects if isinstance(it, Node)}
    if missing := [name for name in wanted.names if name not in nodes]:
        raise click.ClickException(f"there is no node {missing[0]}; run `kubectl get nodes`")
    return [nodes[name] for name in sorted(nodes if wanted.everywhere else set(wanted.names))]


@listing()
def list_objects(client: Client) -> Cluster:
    """Return all Services, EndpointSlices and Nodes. Raises ClickException."""
    cluster = Cluster()
    for listed in all_objects(client):
        cluster.apply(listed)
    return cluster


@contextmanager
def node_access(client: Client, pods: PodOptions) -> Iterator[NodeAccess]:
    """Provide the access to nodes; remove debug pods at the end."""
    if not pods.debug_image:
        yield NodeAccess(client, pods.pod_selector, pods.pod_namespace)
        return
    with DebugPods(client, pods.debug_image, lambda line: echo_line(line, err=True)) as debug_pods:
        yield NodeAccess(client, pods.pod_selector, pods.pod_namespace, debug_pods)


def on_each_node(
    function: Callable[[Node], _Result], nodes: Sequence[Node], pods: PodOptions, label: str
) -> Sequence[_Result]:
    """Return what a function returns for nodes, in any order. Show a progress bar meanwhile."""
    results = []
    with progress(len(nodes), label) as advance:
        for result in side_by_side(function, nodes, pods.at_once):
            results.append(result)
            advance()
    return results
