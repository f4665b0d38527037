"""What an API server knows of one Service, asked once: for those who want to look, not to follow."""

from collections.abc import Iterable
from urllib.parse import quote

from pykubeproxy.objects import Kind, Listed, Object
from pykubeproxy.sources.api import ApiWatch, Selection, Timing
from pykubeproxy.sources.client import Client


def service_objects(
    client: Client, name: str, namespace: str, node_names: Iterable[str], timing: Timing | None = None
) -> tuple[Listed, ...]:
    """The Services of a name, in all namespaces if `namespace` is empty, their EndpointSlices, and the Nodes named.

    Unlike what a proxy watches, headless Services and those of other proxies are among them. A Node that is not there
    is left out. Raises SourceError.
    """
    inside = f"namespaces/{quote(namespace, safe='')}/" if namespace else ""
    services = Selection(
        Kind.SERVICE, f"/api/v1/{inside}services", {"fieldSelector": f"metadata.name={name}"}
    )
    slices = Selection(
        Kind.ENDPOINT_SLICE,
        f"/apis/discovery.k8s.io/v1/{inside}endpointslices",
        {"labelSelector": f"kubernetes.io/service-name={name}"},
    )
    nodes = [
        Selection(Kind.NODE, "/api/v1/nodes", {"fieldSelector": f"metadata.name={node}"})
        for node in dict.fromkeys(node_names)
    ]

    def found(*selections: Selection) -> tuple[Object, ...]:
        watches = [ApiWatch(client, selection, timing or Timing()) for selection in selections]
        return tuple(it for watch in watches for listed in watch.once() for it in listed.objects)

    return (
        Listed(Kind.SERVICE, found(services)),
        Listed(Kind.ENDPOINT_SLICE, found(slices)),
        Listed(Kind.NODE, found(*nodes)),
    )
