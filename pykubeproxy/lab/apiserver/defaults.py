"""What the API server adds to an object: defaults, cluster IPs, node ports. Objects are filled in place."""

import msgspec

from pykubeproxy.lab.apiserver.allocation import Allocations, Claim
from pykubeproxy.lab.apiserver.errors import ApiError, invalid
from pykubeproxy.lab.apiserver.resources import (
    ENDPOINT_SLICES,
    NODE_STATUS,
    NODES,
    PODS,
    SERVICES,
    JsonObject,
    Resource,
)
from pykubeproxy.lab.apiserver.validation import WITH_NODE_PORTS, check_types, check_values
from pykubeproxy.objects import Family, check

_POD_SPEC: JsonObject = {
    "restartPolicy": "Always",
    "terminationGracePeriodSeconds": 30,
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "serviceAccountName": "default",
}
_ADDRESS_FIELDS = ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy")


def admit(
    resource: Resource, item: JsonObject, old: JsonObject | None, path: str, in_use: Allocations
) -> None:
    """Fill in an object and check it. Raise a 400 or 422. `old` is None when it is created."""
    item["metadata"].setdefault("name", "")
    for field, value in msgspec.json.decode(resource.blank).items():
        item.setdefault(field, value)
    check_types(resource, item)
    if resource is SERVICES:
        _ServiceDefaults(item, old, path, in_use).fill()
    elif resource is ENDPOINT_SLICES:
        _fill_slice(item, old)
    elif resource is NODES:
        _fill_node(item)
    elif resource is PODS:
        _fill_pod(item)
    check_values(resource, item)


def claims(service: JsonObject) -> frozenset[Claim]:
    """Return the cluster IPs and node ports of a service; none if it was stored with a wrong type."""
    try:
        spec = service["spec"]
        addresses = [check.address(ip, "clusterIPs") for ip in spec.get("clusterIPs", []) if ip != "None"]
        ports = [port.get("nodePort") for port in spec.get("ports", [])]
        return frozenset(filter(None, [*addresses, *ports, spec.get("healthCheckNodePort")]))
    except (AttributeError, KeyError, TypeError, ValueError):
        return frozenset()


def _fill_slice(item: JsonObject, old: JsonObject | None) -> None:
    for port in item["ports"] or []:
        port.setdefault("name", "")
        port.setdefault("protocol", "TCP")
    if old is not None and old.get("addressType") != item["addressType"]:
        raise invalid(ENDPOINT_SLICES, item["metadata"]["name"], "addressType", "field is immutable")


def _fill_node(item: JsonObject) -> None:
    spec = item["spec"]
    if spec.get("podCIDRs"):
        spec.setdefault("podCIDR", spec["podCIDRs"][0])
    elif spec.get("podCIDR"):
        spec["podCIDRs"] = [spec["podCIDR"]]
    status = item["status"] = NODE_STATUS | item["status"]
    status["nodeInfo"] = NODE_STATUS["nodeInfo"] | status["nodeInfo"]


def _fill_pod(item: JsonObject) -> None:
    for field, value in _POD_SPEC.items():
        item["spec"].setdefault(field, value)
    item["status"].setdefault("phase", "Pending")


class _ServiceDefaults:
    """Fills in one service."""

    def __init__(self, item: JsonObject, old: JsonObject | None, path: str, in_use: Allocations) -> None:
        self._item = item
        self._spec: JsonObject = item["spec"]
        self._ports: list[JsonObject] = self._spec.get("ports", [])
        self._before: JsonObject = old["spec"] if old else {}
        self._path = path
        self._in_use = in_use

    def fill(self) -> None:
        """Add what is missing. Raise a 422 for an address or port that cannot be allocated."""
        spec = self._spec
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("sessionAffinity", "None")
        if spec["sessionAffinity"] == "ClientIP":
            client_ip = spec.setdefault("sessionAffinityConfig", {}).setdefault("clientIP", {})
            client_ip.setdefault("timeoutSeconds", 10800)
        else:
            spec.pop("sessionAffinityConfig", None)
        for port in self._ports:
            port.setdefault("protocol", "TCP")
            port["targetPort"] = port.get("targetPort") or port["port"]
        self._inherit()
        if spec["type"] != "ExternalName":
            spec.setdefault("internalTrafficPolicy", "Cluster")
            self._fill_cluster_ips()
        if self._externally_accessible:
            spec.setdefault("externalTrafficPolicy", "Cluster")
        if spec["type"] == "LoadBalancer":
            spec.setdefault("allocateLoadBalancerNodePorts", True)
        self._fill_node_ports()
        for ingress in self._item["status"].setdefault("loadBalancer", {}).get("ingress", []):
            if ingress.get("ip"):
                ingress.setdefault("ipMode", "VIP")

    @property
    def _externally_accessible(self) -> bool:
        with_external_ips = self._spec["type"] == "ClusterIP" and bool(self._spec.get("externalIPs"))
        return self._spec["type"] in WITH_NODE_PORTS or with_external_ips

    @property
    def _has_health_check(self) -> bool:
        spec = self._spec
        return spec["type"] == "LoadBalancer" and spec.get("externalTrafficPolicy") == "Local"

    def _inherit(self) -> None:
        """Keep what was allocated if a replacement leaves it out; drop unchanged fields that only the old type has."""
        spec, before = self._spec, self._before
        kept = dict.fromkeys(_ADDRESS_FIELDS, spec["type"] != "ExternalName")
        kept["healthCheckNodePort"] = self._has_health_check
        dropped = {field for field, keep in kept.items() if not keep}
        if not self._externally_accessible:
            dropped.add("externalTrafficPolicy")
        if spec["type"] != "LoadBalancer":
            dropped.add("allocateLoadBalancerNodePorts")
        for field, value in before.items():
            if kept.get(field):
                spec.setdefault(field, value)
            elif field in dropped and spec.get(field) == value:
                del spec[field]
        old_ports = before.get("ports", [])
        allocated = {port.get("name", ""): port["nodePort"] for port in old_ports if port.get("nodePort")}
        requested = {port.get("nodePort") for port in self._ports}
        for port in self._ports:
            if spec["type"] not in WITH_NODE_PORTS and port.get("nodePort") in allocated.values():
                del port["nodePort"]
            elif spec["type"] in WITH_NODE_PORTS and not port.get("nodePort"):
                number = allocated.get(port.get("name", ""))
                if number and number not in requested:
                    port["nodePort"] = number

    def _fill_cluster_ips(self) -> None:
        spec, before = self._spec, self._before
        addresses = list(spec.get("clusterIPs") or filter(None, [spec.get("clusterIP")]))
        old = before.get("clusterIP")
        if old and before.get("type") != "ExternalName" and spec.get("clusterIP", old) != old:
            reason = f'Invalid value: ["{spec["clusterIP"]}"]: may not change once set'
            raise self._invalid("spec.clusterIPs[0]", reason)
        headless = addresses == ["None"]
        if headless and not spec.get("selector") and "ipFamilyPolicy" not in spec:
            dual_stack = len(self._in_use.families) > 1
            spec["ipFamilyPolicy"] = "RequireDualStack" if dual_stack else "SingleStack"
        families = spec["ipFamilies"] = self._families([] if headless else addresses)
        if not headless:
            requested = [*addresses, *[""] * len(families)]
            addresses = [self._address(family, requested[i]) for i, family in enumerate(families)]
        spec["clusterIP"], spec["clusterIPs"] = addresses[0], addresses

    def _families(self, addresses: list[str]) -> list[str]:
        """Return the families in order: those requested, those of the addresses, or the cluster's first."""
        available = self._in_use.families
        of_addresses = ["IPv6" if ":" in address else "IPv4" for address in addresses]
        families = list(self._spec.get("ipFamilies") or of_addresses or available[:1])
        default = "SingleStack" if len(families) < 2 else "RequireDualStack"
        policy = self._spec.setdefault("ipFamilyPolicy", default)
        if policy == "SingleStack":
            families = families[:1]
        else:
            families += [family for family in available if family not in families]
        if set(families) - set(available) or (policy == "RequireDualStack" and len(families) < 2):
            reason = f'Invalid value: "{policy}": this cluster has service addresses of {", ".join(available)} only'
            raise self._invalid("spec.ipFamilyPolicy", reason)
        return families

    def _address(self, family: str, requested: str) -> str:
        """Return the requested address or, for "", the next free one."""
        try:
            address = check.address_of(
                Family(family), requested or self._in_use.next_address(family), "the address"
            )
        except ValueError as error:
            raise self._invalid("spec.clusterIPs", f"Invalid value: {error}") from error
        if self._in_use.taken(address, self._path):
            reason = f"failed to allocate IP {address}: provided IP is already allocated"
            raise self._invalid("spec.clusterIPs", f'Invalid value: ["{address}"]: {reason}')
        return address

    def _fill_node_ports(self) -> None:
        spec = self._spec
        allocated = {port.get("port"): port["nodePort"] for port in self._ports if port.get("nodePort")}
        numbers = {port["nodePort"] for port in self._ports if port.get("nodePort")}
        if self._has_health_check and spec.get("healthCheckNodePort"):
            numbers.add(spec["healthCheckNodePort"])
        for number in numbers:
            if self._in_use.taken(number, self._path):
                reason = f"Invalid value: {number}: provided port is already allocated"
                raise self._invalid("spec.ports[0].nodePort", reason)
        if spec["type"] == "NodePort" or spec.get("allocateLoadBalancerNodePorts") is True:
            for port in self._ports:
                if not port.get("nodePort"):
                    # One port number under two protocols, as of a DNS service, gets one node port.
                    number = allocated.get(port["port"]) or self._next_port(numbers)
                    port["nodePort"] = allocated[port["port"]] = number
        if self._has_health_check and not spec.get("healthCheckNodePort"):
            spec["healthCheckNodePort"] = self._next_port(numbers)

    def _next_port(self, numbers: set[int]) -> int:
        """Allocate a node port and add it to `numbers`."""
        number = self._in_use.next_port(numbers)
        numbers.add(number)
        return number

    def _invalid(self, field: str, reason: str) -> ApiError:
        return invalid(SERVICES, self._item["metadata"]["name"], field, reason)
