"""Pods of an API server: list, read, create and delete them. Only commands do; the agent reads none."""

import time
from collections.abc import Mapping
from urllib.parse import quote

from pykubeproxy.objects.pods import Pod, decode_pod
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Failure
from pykubeproxy.sources.lists import list_items

_SECONDS = 60.0  # for a request


def list_pods(
    client: Client,
    namespace: str = "",
    *,
    labels: str = "",
    name: str = "",
    node: str = "",
    address: str = "",
) -> tuple[Pod, ...]:
    """Return the Pods of a namespace, or of all; skip unreadable ones. Raises Failure.

    `labels` is a label selector; `name`, `node` and the primary IP `address` must match if given.
    """
    fields = {"metadata.name": name, "spec.nodeName": node, "status.podIP": address}
    field_selector = ",".join(f"{field}={value}" for field, value in fields.items() if value)
    selectors = {"labelSelector": labels, "fieldSelector": field_selector}
    given = {key: value for key, value in selectors.items() if value}
    return list_items(client, _path(namespace), "Pod", given, decode_pod)


def get_pod(client: Client, namespace: str, name: str) -> Pod:
    """Return a Pod. Raises Failure."""
    end = time.monotonic() + _SECONDS
    with client.stream(
        _path(namespace, name), {}, resource=f"pod {name}", verbs="get of", idle=_SECONDS, end=end
    ) as body:
        return _decoded(b"".join(body))


def create_pod(client: Client, namespace: str, manifest: Mapping[str, object]) -> Pod:
    """Create a Pod and return it. Raises Failure."""
    return _decoded(client.post(_path(namespace), manifest, resource="pods", idle=_SECONDS))


def delete_pod(client: Client, namespace: str, name: str) -> None:
    """Delete a Pod at once. Raises Failure."""
    client.delete(_path(namespace, name), {"gracePeriodSeconds": 0}, resource=f"pod {name}", idle=_SECONDS)


def _decoded(text: bytes) -> Pod:
    try:
        return decode_pod(text)
    except ValueError as error:
        raise Failure(f"the API server sent an invalid pod: {error}") from None


def _path(namespace: str, name: str = "") -> str:
    inside = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"/api/v1{inside}/pods" + (f"/{quote(name, safe='')}" if name else "")
