"""The objects in which targets are looked up."""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property

import msgspec

from pykubeproxy.inspect.targets.parse import TargetKind
from pykubeproxy.objects import EndpointPort, EndpointSlice, Key, Node, Service
from pykubeproxy.objects.pods import Pod


class Directory(msgspec.Struct, frozen=True, dict=True):
    """Objects at one place, at least those that the targets name.

    - `place`: where they come from, in a sentence: "on the API server"
    - `advice`: what to do if an object of a kind is missing there: "add --kubeconfig to ask the API server"
    - `listed_pods`: Pods of the API; those that serve a Service are also known from `slices`
    - `pod_networks`: the CIDRs of all pods, as far as the configuration tells
    - `here`: the name of the node whose rules are inspected, "" if unknown
    """

    place: str
    advice: Mapping[TargetKind, str] = {}
    services: tuple[Service, ...] = ()
    slices: tuple[EndpointSlice, ...] = ()
    nodes: tuple[Node, ...] = ()
    listed_pods: tuple[Pod, ...] = ()
    pod_networks: tuple[str, ...] = ()
    here: str = ""

    def service(self, key: Key) -> Service | None:
        """Return a Service by name."""
        return next((it for it in self.services if it.key == key), None)

    def node(self, name: str) -> Node | None:
        """Return a Node by name."""
        return next((it for it in self.nodes if it.name == name), None)

    def pod(self, key: Key) -> Pod | None:
        """Return a Pod by name."""
        return self.pods.get(key)

    @cached_property
    def pods(self) -> dict[Key, Pod]:
        """All known Pods: those of the API, and those that EndpointSlices name."""
        return {**_pods_of(self.slices), **{it.key: it for it in self.listed_pods}}

    @cached_property
    def _pods_by_address(self) -> dict[str, Pod]:
        return {
            address: it
            for it in self.pods.values()
            if not it.finished and not it.host_network
            for address in it.addresses
        }

    def pod_at(self, address: str) -> Pod | None:
        """Return the Pod that has an address for itself."""
        pod = self._pods_by_address.get(address)
        return pod if pod and not self.node_at(address) else None

    def node_at(self, address: str) -> Node | None:
        """Return the Node that has an address."""
        return next((it for it in self.nodes if address in it.addresses), None)

    def node_of_pods_at(self, address: str) -> Node | None:
        """Return the Node whose pod CIDRs contain an address."""
        return next((it for it in self.nodes if _is_in(address, it.pod_cidrs)), None)

    def is_pod_network(self, address: str) -> bool:
        """Return whether the configuration or a Node says that an address is a pod's."""
        return _is_in(address, self.pod_networks) or self.node_of_pods_at(address) is not None

    def pods_of(self, service: Key) -> tuple[Pod, ...]:
        """Return the Pods that the EndpointSlices of a Service name."""
        named = _pods_of(it for it in self.slices if it.service_key == service)
        return tuple(self.pods[key] for key in sorted(named))


def _pods_of(slices: Iterable[EndpointSlice]) -> dict[Key, Pod]:
    """Return what EndpointSlices tell about the Pods they name; a slice for each family names a Pod."""
    found: dict[Key, list[Pod]] = {}
    for pod in _named(slices):
        found.setdefault(pod.key, []).append(pod)
    return {key: _merged(some) for key, some in found.items()}


def _named(slices: Iterable[EndpointSlice]) -> Iterator[Pod]:
    for slice_ in slices:
        ports = tuple(port for port in slice_.ports if port.port)
        for endpoint in slice_.endpoints:
            if endpoint.pod and endpoint.address:
                yield Pod(
                    slice_.namespace,
                    endpoint.pod,
                    (endpoint.address,),
                    endpoint.node_name,
                    ready=endpoint.ready and not endpoint.terminating,
                    ports=ports,
                )


def _merged(pods: list[Pod]) -> Pod:
    ports: dict[tuple[str, int | None], EndpointPort] = {}
    for pod in pods:
        for port in pod.ports:
            ports.setdefault((port.protocol.value, port.port), port)
    return msgspec.structs.replace(
        pods[0],
        addresses=tuple(dict.fromkeys(address for pod in pods for address in pod.addresses)),
        ready=all(pod.ready for pod in pods),
        ports=tuple(ports.values()),
    )


def _is_in(address: str, networks: Iterable[str]) -> bool:
    """Return whether networks contain an address. Those of an agent are not checked: ignore invalid ones."""
    ip = ipaddress.ip_address(address)
    for network in networks:
        with suppress(ValueError):
            if ip in ipaddress.ip_network(network):
                return True
    return False
