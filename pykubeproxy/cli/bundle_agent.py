"""The agent in a bundle: its objects, configuration and status."""

from typing import NamedTuple

import click
import msgspec

from pykubeproxy.agent.observe import object_documents
from pykubeproxy.agent.observe.object_documents import Objects
from pykubeproxy.bundle.layout import OBJECTS, STATUS
from pykubeproxy.bundle.read import Bundle
from pykubeproxy.config import Config, ConfigError, load
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.services.affinity import rivals
from pykubeproxy.services.ports import PortName


class NoObjects(click.ClickException):
    """A bundle has no objects that this version can read."""


class BundledAgent(NamedTuple):
    """The objects in a bundle, and the configuration; None if that is unknown, as for kube-proxy."""

    objects: Objects
    config: Config | None


def bundled_agent(bundle: Bundle, query: ServiceFilter | None = None) -> BundledAgent:
    """Return the objects and the configuration in a bundle, of all Services or those that match a query.

    Raises NoObjects.
    """
    if OBJECTS not in bundle.files:
        raise NoObjects(
            f"{bundle.name} has no objects ({bundle.why_missing(OBJECTS)}); add -f PATH for objects in files, or"
            " --kubeconfig PATH for those of the API server"
        )
    try:
        document = object_documents.decode(bundle.files[OBJECTS])
        config = load(document.config.encode(), {}).config if document.config else None
    except (ValueError, ConfigError) as error:
        raise NoObjects(
            f"cannot read the objects in {bundle.name}: {error}; use the pykubeproxy that made it, or add -f PATH or"
            " --kubeconfig PATH"
        ) from None
    objects = document.objects if query is None else _matching(document.objects, query)
    return BundledAgent(objects, config)


def has_objects(bundle: Bundle) -> bool:
    """Return whether a bundle has the objects of its node's agent."""
    return OBJECTS in bundle.files


def bundled_status(bundle: Bundle) -> bytes:
    """Return the agent's status in a bundle, as JSON. Raises ClickException if it has none."""
    if STATUS in bundle.files:
        return bundle.files[STATUS]
    raise click.ClickException(
        f"{bundle.name} has no status of an agent ({bundle.why_missing(STATUS)}); use `pykubeproxy dump-rules` or"
        " `pykubeproxy diff` with this bundle"
    )


def _matching(objects: Objects, query: ServiceFilter) -> Objects:
    """Return what /servicez returns for a Service."""

    def matches(namespace: str, name: str) -> bool:
        return query.namespace in ("", namespace) and query.name in ("", name)

    def of_port(name: PortName) -> bool:
        return matches(name.namespace, name.service)

    services = tuple(it for it in objects.services if matches(it.namespace, it.name))
    services += rivals(services, objects.services)
    keys = {it.key for it in services}
    return msgspec.structs.replace(
        objects,
        services=services,
        slices=tuple(it for it in objects.slices if it.service_key in keys),
        quarantined=tuple(it for it in objects.quarantined if of_port(it.port_name)),
    )
