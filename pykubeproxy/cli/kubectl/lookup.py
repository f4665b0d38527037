"""What the plugin looks up in the API server for names and addresses."""

from collections.abc import Sequence
from typing import NamedTuple

from pykubeproxy.cli.kubectl.access import GRANTS, listing
from pykubeproxy.cli.server_lookup import ON_SERVER, PodsForbidden, find_pods, of_kind, with_targets
from pykubeproxy.cli.terminal import echo_line
from pykubeproxy.config import load
from pykubeproxy.inspect.targets import Directory, Target, TargetKind
from pykubeproxy.objects import EndpointSlice, Family, Kind, Listed, Node, Service
from pykubeproxy.objects.pods import Pod
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import Client, all_objects, list_kind


class Objects(NamedTuple):
    """Objects of the API server: all Nodes, and at least the Services and pods that were asked for."""

    cluster: Cluster
    directory: Directory


@listing()
def look_up(client: Client, targets: Sequence[Target]) -> Objects:
    """Return the objects that targets name; for an address, all Services. Raises ClickException.

    If the account may not list pods, so that an address stays unknown, a note goes to standard error.
    """
    services = [it for it in targets if it.kind is TargetKind.SERVICE]
    names_one_service = len(services) == 1 and not any(_is_destination_address(it) for it in targets)
    listed = (list_kind(client, Kind.NODE),) if names_one_service else all_objects(client)
    everything = Directory(
        ON_SERVER,
        services=of_kind(Service, listed),
        slices=of_kind(EndpointSlice, listed),
        nodes=tuple(sorted(of_kind(Node, listed), key=lambda node: node.name)),
        listed_pods=_pods_at(client, [it.name for it in targets if it.kind is TargetKind.ADDRESS]),
    )
    directory = with_targets(client, targets, everything)
    cluster = Cluster()
    cluster.apply(Listed(Kind.SERVICE, directory.services))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, directory.slices))
    cluster.apply(Listed(Kind.NODE, directory.nodes))
    return Objects(cluster, directory)


def contexts_of(node: Node) -> dict[Family, RuleContext]:
    """Return the contexts of a node with a default configuration: the API server does not know the proxies'."""
    config = load(None, {}).config
    facts = KernelFacts(addresses=node.addresses)
    return {it: rule_context(config, node.name, node, facts, it) for it in Family}


def _is_destination_address(target: Target) -> bool:
    return target.kind is TargetKind.ADDRESS and bool(target.port)


def _pods_at(client: Client, addresses: Sequence[str]) -> tuple[Pod, ...]:
    try:
        return tuple(pod for address in addresses for pod in find_pods(client, address=address))
    except PodsForbidden as error:
        echo_line(f"Note: {error}; {GRANTS}. Only pods in EndpointSlices are known.", err=True)
        return ()
