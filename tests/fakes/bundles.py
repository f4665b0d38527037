"""Bundles of the node of a conformance case, whose rules kube-proxy wrote."""

import io
from collections.abc import Iterable
from typing import Any

from pykubeproxy.bundle import layout
from pykubeproxy.bundle.layout import Manifest, tables_file
from pykubeproxy.bundle.write import BundleSection, Content, collected, write_bundle
from pykubeproxy.config import dump
from pykubeproxy.kernel.network import LocalAddress, TableRoute
from pykubeproxy.objects import Family
from pykubeproxy.pages import servicez
from pykubeproxy.pages.servicez import NodeObjects, ObjectDocument
from tests.cases import ADDRESSES, cluster_of, config_of, load_case, node_of

NODE, TIME = "node1", "2026-01-31T12:00:00Z"
ROUTES = (TableRoute(254, "10.244.1.0/24", interface="cni0"), TableRoute(254, "0.0.0.0/0", interface="eth0"))


def section(name: str, text: bytes) -> BundleSection:
    return BundleSection(name, "test", lambda content: content.write(text))


def failing(name: str, error: Exception) -> BundleSection:
    def fail(content: Content) -> None:
        content.write(b"the beginning\n")
        raise error

    return BundleSection(name, "test", fail)


def objects_of(case: dict[str, Any]) -> bytes:
    """The page /servicez of an agent with the objects of a case."""
    cluster = cluster_of(case)
    services = tuple(cluster.services())
    slices = tuple(it for service in services for it in cluster.all_slices_of(service.key))
    return servicez.encode(
        ObjectDocument(NodeObjects(node_of(case), services, slices), dump(config_of(case)))
    )


def sections_of(name: str, tables: dict[str, str], *, with_objects: bool = True) -> list[BundleSection]:
    """The sections of the node of a case with these tables, by name of the file."""
    case = load_case(name)
    found = [section(file, text.encode()) for file, text in tables.items()]
    addresses = [LocalAddress(it, 24, "eth0") for it in ADDRESSES]
    found.append(BundleSection(layout.ADDRESSES, "test", lambda content: content.write_json(addresses)))
    found.append(BundleSection(layout.ROUTES, "test", lambda content: content.write_json(ROUTES)))
    if with_objects:
        text = objects_of(case)
        found.append(BundleSection(layout.OBJECTS, "test", lambda content: content.write_json_text(text)))
    return found


def written(sections: Iterable[BundleSection], node: str = NODE) -> bytes:
    """A bundle as a file has it."""
    file = io.BytesIO()
    write_bundle(file, Manifest(version="0.1.0", node=node, time=TIME), collected(sections))
    return file.getvalue()


def files_of(saved: dict[Family, str], backend: str = "nft") -> dict[str, str]:
    """The names of files with tables, and their texts."""
    return {tables_file(family, backend): text for family, text in saved.items()}
