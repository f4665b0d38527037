"""What the plugin looks up in the API server for names and addresses."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import click

from pykubeproxy.config import load
from pykubeproxy.inspect.targets import Directory, Target, TargetKind
from pykubeproxy.objects import EndpointSlice, Family, Kind, Listed, Node, Service
from pykubeproxy.objects.pods import KnownPod
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import Client, PodsForbidden, all_objects, find_pods, list_kind, service_objects


class Objects(NamedTuple):
    """Objects of the API server: all Nodes, and at least the Services and pods that were asked for."""

    cluster: Cluster
    directory: Directory


def look_up(client: Client, targets: Sequence[Target]) -> Objects:
    """Return the objects that targets name; for an address, all Services. Raises SourceError.

    If the account may not list pods, a note goes to standard error.
    """
    listed = _listed(client, targets)
    cluster = Cluster()
    for one in listed:
        cluster.apply(one)
    every = [it for one in listed for it in one.objects]
    directory = Directory(
        "on the API server",
        services=tuple(it for it in every if isinstance(it, Service)),
        slices=tuple(it for it in every if isinstance(it, EndpointSlice)),
        nodes=tuple(sorted((it for it in every if isinstance(it, Node)), key=lambda node: node.name)),
        listed_pods=_pods(client, targets),
    )
    return Objects(cluster, directory)


def contexts_of(node: Node) -> dict[Family, RuleContext]:
    """Return the contexts of a node with a default configuration: the API server does not know the proxies'."""
    config = load(None, {}).config
    facts = KernelFacts(addresses=node.addresses)
    return {it: rule_context(config, node.name, node, facts, it) for it in Family}


def _listed(client: Client, targets: Sequence[Target]) -> Sequence[Listed]:
    services = [it for it in targets if it.kind is TargetKind.SERVICE]
    if len(services) == 1 and not any(it.kind is TargetKind.ADDRESS and it.port for it in targets):
        (service,) = services
        found = service_objects(client, service.name, service.namespace, ())
        if any(one.kind is Kind.SERVICE and one.objects for one in found):
            return (*(one for one in found if one.kind is not Kind.NODE), list_kind(client, Kind.NODE))
    return all_objects(client)


def _pods(client: Client, targets: Sequence[Target]) -> tuple[KnownPod, ...]:
    """Return the pods that targets name by name or address; for an unknown name, all of its namespace."""
    try:
        return tuple(pod for target in targets for pod in _pods_of(client, target))
    except PodsForbidden as error:
        click.echo(f"Note: {error}. Only pods in EndpointSlices are known.", err=True)
        return ()


def _pods_of(client: Client, target: Target) -> Iterator[KnownPod]:
    if target.kind is TargetKind.POD:
        yield from find_pods(client, target.namespace, target.name) or find_pods(client, target.namespace)
    elif target.kind is TargetKind.ADDRESS:
        yield from find_pods(client, address=target.name)
