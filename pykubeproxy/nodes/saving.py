"""Save nodes in bundles through the API server: made in our pods, or here from what other pods print."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pykubeproxy
from pykubeproxy.bundle.layout import (
    BACKEND_TABLES,
    FILES,
    FLOWS,
    NFT_RULESET,
    OBJECTS,
    PLAIN_TABLES,
    BundledFile,
    Manifest,
    folder_name,
    missing,
    timestamp,
)
from pykubeproxy.bundle.read import Bundle, InvalidBundle, read_bundle
from pykubeproxy.bundle.write import BundleSection, Content, Member, collected, member, new_file, write_bundle
from pykubeproxy.inspect.node import UnknownNode
from pykubeproxy.nodes.cluster import NodeAccess, NodePods, is_windows, print_flows, read_node
from pykubeproxy.nodes.proxies import KUBE_PROXY, ProxyPod
from pykubeproxy.objects import Node
from pykubeproxy.pages import servicez
from pykubeproxy.pages.servicez import NodeObjects, ObjectDocument
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Failure, Forbidden
from pykubeproxy.sources.pods import CommandTimedOut, ContainerRef, NotInImage, run_in_pod
from pykubeproxy.wording import one_line

# The limits of `pykubeproxy bundle` in a pod, whose commands have limits of their own.
_SECONDS = 300.0
_MOST_BYTES = 512 << 20
_BUNDLE = ("pykubeproxy", "bundle", "-o", "-")
_SILENCE = 30.0  # of a program that prints tables
# Other commands in the same pod would fail in the same way.
_FATAL = (CommandTimedOut, Forbidden)


class WrittenBundle(NamedTuple):
    """The bundle of a node and the files that it lacks, or the reason why there is none.

    `other_proxy` is True if the reason is no fault, but that another program serves Services there.
    """

    node: Node
    path: Path | None = None
    missing: tuple[BundledFile, ...] = ()
    failure: str = ""
    other_proxy: bool = False


class _NoTables(Exception):
    """No program in a pod prints tables; str() is why."""


class _Unable(Exception):
    """A pod could not make a bundle; str() is what it says."""


def save_node(
    access: NodeAccess,
    pods: NodePods,
    objects: Callable[[], Cluster],
    target: Callable[[str], Path],
    node: Node,
    *,
    with_flows: bool = False,
) -> WrittenBundle:
    """Save a node in the file that `target` returns for the name of a folder; `with_flows` adds its connections.

    `objects` lists those of the cluster, for a bundle that would have none: there is no agent of ours, or an old one. A
    debug pod serves only without a pod that can.
    """
    time = timestamp(datetime.now(UTC))
    path = target(folder_name(node.name, time))
    proxy = pods.proxy(node)
    failure = ""
    about = Manifest(version=pykubeproxy.__version__, node=node.name, time=time, proxy=str(proxy or ""))
    listed = BundleSection(OBJECTS, "API server", partial(_objects, objects, node))
    for container, is_kube_proxy in _containers(access, node, proxy):
        try:
            with container as opened:
                lacks = None
                if not is_kube_proxy:
                    added = None if proxy and proxy.ours else listed
                    lacks = _copy(access.client, opened, about, added, path, with_flows)
                if lacks is None:
                    lacks = _make(access.client, opened, about, listed, path, with_flows)
                return WrittenBundle(node, path, lacks)
        except _NoTables as error:
            failure = f"{error}; use --debug-image with an image that has iptables-save"
        except (Failure, InvalidBundle) as error:
            return WrittenBundle(node, failure=str(error))
        except OSError as error:
            return WrittenBundle(node, failure=f"cannot write {path}: {error.strerror or error}")
    if failure:
        return WrittenBundle(node, failure=failure)
    outcome = read_node(access, node, pods)  # it says why there is no pod
    if isinstance(outcome, UnknownNode):
        return WrittenBundle(node, failure=outcome.reason, other_proxy=outcome.by_design)
    return WrittenBundle(node, failure="the pod of its proxy has started just now; retry")


def _containers(
    access: NodeAccess, node: Node, proxy: ProxyPod | None
) -> Iterator[tuple[AbstractContextManager[ContainerRef], bool]]:
    """Yield the containers to try, and whether it is kube-proxy's, which has no pykubeproxy."""
    if proxy and proxy.pod.runs:
        yield nullcontext(proxy.target), proxy.proxy == KUBE_PROXY
    if access.debug_pods and not is_windows(node):
        yield access.debug_pods.on(node.name), False


def _copy(
    client: Client,
    container: ContainerRef,
    about: Manifest,
    objects: BundleSection | None,
    path: Path,
    with_flows: bool,
) -> tuple[BundledFile, ...] | None:
    """Copy the bundle that a pod of ours makes, and check it; return the files that it lacks.

    If it has no objects, add those of the section `objects`, and replace the manifest with `about`: a debug pod knows
    neither. Return None if the pod has no such command. Raises Failure, InvalidBundle, OSError.
    """
    command = (*_BUNDLE, "--flows") if with_flows else _BUNDLE
    try:
        with new_file(path) as file:
            ended = run_in_pod(
                client, container, command, write=file.write, seconds=_SECONDS, max_bytes=_MOST_BYTES
            )
            if ended.exit_code:
                raise _Unable(one_line(ended.errors) or f"exit status {ended.exit_code}")
            file.seek(0)
            title = f"the bundle of pod {container}"
            bundle = read_bundle(file, title)
            if objects is None or OBJECTS in bundle.files:
                return missing(bundle.manifest.files)
            file.seek(0)
            members = _with_section(read_bundle(file, title, FILES), objects)
            file.seek(0)
            file.truncate()
            write_bundle(file, about, members)
            return missing(entry.file for entry in members)
    except NotInImage:
        return None
    except _Unable as error:
        if "No such command" in str(error):
            return None
        raise Failure(f"`{' '.join(command)}` in pod {container} failed: {error}") from None


def _with_section(bundle: Bundle, section: BundleSection) -> tuple[Member, ...]:
    others = [file for file in bundle.manifest.files if file.name != section.name]
    kept = [
        member(other, bundle.files[other.name]) if other.name in bundle.files else Member(other)
        for other in others
    ]
    return (*kept, *collected([section]))


def _make(
    client: Client,
    container: ContainerRef,
    about: Manifest,
    objects: BundleSection,
    path: Path,
    with_flows: bool,
) -> tuple[BundledFile, ...]:
    """Make a bundle here of what the programs in a pod print. Raises _NoTables, Failure, OSError."""
    others = [
        _section(client, container, NFT_RULESET, ("nft", "-j", "list", "ruleset")),
        objects,
    ]
    if with_flows:
        others.insert(
            1, BundleSection(FLOWS, f"conntrack in pod {container}", partial(_flows, client, container))
        )
    members = (*_tables(client, container), *collected(others, fatal=_FATAL))
    with new_file(path) as file:
        write_bundle(file, about, members)
    # Images of kube-proxy have no nft before 1.31.
    return missing(entry.file for entry in members if entry.file.name != NFT_RULESET)


def _tables(client: Client, container: ContainerRef) -> Sequence[Member]:
    found: Sequence[Member] = ()
    for names in (BACKEND_TABLES, PLAIN_TABLES):
        commands = ((name, (name.removesuffix(".txt"), "-c")) for name in names)
        found = tuple(
            collected((_section(client, container, *command) for command in commands), fatal=_FATAL)
        )
        if not all(entry.file.error for entry in found):
            return found
    raise _NoTables(found[0].file.error)


def _section(client: Client, container: ContainerRef, name: str, command: tuple[str, ...]) -> BundleSection:
    return BundleSection(
        name, f"{' '.join(command)} in pod {container}", partial(_run, client, container, command)
    )


def _run(client: Client, container: ContainerRef, command: tuple[str, ...], content: Content) -> None:
    ended = run_in_pod(client, container, command, write=content.write, silence=_SILENCE)
    if ended.exit_code:
        reason = one_line(ended.errors) or f"exit status {ended.exit_code}"
        raise Failure(f"{command[0]} in pod {container} failed: {reason}")


def _flows(client: Client, container: ContainerRef, content: Content) -> None:
    text, *_ = print_flows(client, container)
    content.write(text.encode())


def _objects(objects: Callable[[], Cluster], node: Node, content: Content) -> None:
    """Write what /servicez of an agent on the node would have; its configuration is unknown here."""
    cluster = objects()
    services = tuple(cluster.services())
    slices = tuple(
        endpoint_slice for service in services for endpoint_slice in cluster.all_slices_of(service.key)
    )
    document = ObjectDocument(NodeObjects(node, services, slices), config="")
    content.write_json_text(servicez.encode(document))
