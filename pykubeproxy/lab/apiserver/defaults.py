"""What the API server adds to an object that a client wrote: defaults, cluster IPs, node ports.

Each function fills in a plain object in place. `old` is the object as it was, None when it is being created.
"""

import ipaddress
from collections.abc import Iterable

from pykubeproxy.lab.apiserver.allocation import Allocations, Claim
from pykubeproxy.lab.apiserver.errors import ApiError, invalid
from pykubeproxy.lab.apiserver.resources import ENDPOINT_SLICES, NODES, SERVICES, JsonObject, Resource
from pykubeproxy.lab.apiserver.validation import check_types, check_values, is_address

_NODE_INFO = (
    "machineID",
    "systemUUID",
    "bootID",
    "kernelVersion",
    "osImage",
    "containerRuntimeVersion",
    "kubeletVersion",
    "kubeProxyVersion",
    "operatingSystem",
    "architecture",
)
_WITH_NODE_PORTS = ("NodePort", "LoadBalancer")


def admit(
    resource: Resource, item: JsonObject, old: JsonObject | None, path: str, in_use: Allocations
) -> None:
    """Fill in an object and check it. Raises a 400 or 422 for one that a real server would refuse, too."""
    check_types(resource, item)
    if resource is SERVICES:
        _fill_service(item, old, path, in_use)
    elif resource is ENDPOINT_SLICES:
        _fill_slice(item, old)
    elif resource is NODES:
        _fill_node(item)
    check_values(resource, item)


def claims(service: JsonObject) -> frozenset[Claim]:
    """The cluster IPs and node ports that a service occupies. One stored verbatim with a wrong type occupies none."""
    try:
        spec = service["spec"]
        addresses = [str(ipaddress.ip_address(ip)) for ip in spec.get("clusterIPs", []) if ip != "None"]
        ports = [port.get("nodePort", 0) for port in spec.get("ports", [])]
        return frozenset(
            [*addresses, *(port for port in [*ports, spec.get("healthCheckNodePort", 0)] if port)]
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return frozenset()


def without_nulls(item: JsonObject) -> JsonObject:
    """A deep copy in which a null is what it is to the API: the same as a member that is not there."""
    return {name: _copied(value) for name, value in item.items() if value is not None}


def _copied(value: object) -> object:
    if isinstance(value, dict):
        return without_nulls(value)
    return [_copied(element) for element in value] if isinstance(value, list) else value


def _fill_slice(item: JsonObject, old: JsonObject | None) -> None:
    item.setdefault("endpoints", None)
    item.setdefault("ports", None)
    for port in item["ports"] or []:
        port.setdefault("name", "")
        port.setdefault("protocol", "TCP")
    if old is not None and old.get("addressType") != item.get("addressType"):
        name = item["metadata"].get("name", "")
        raise invalid("EndpointSlice", ENDPOINT_SLICES.group, name, "addressType", "field is immutable")


def _fill_node(item: JsonObject) -> None:
    spec = item.setdefault("spec", {})
    if spec.get("podCIDRs"):
        spec.setdefault("podCIDR", spec["podCIDRs"][0])
    elif spec.get("podCIDR"):
        spec["podCIDRs"] = [spec["podCIDR"]]
    status = item.setdefault("status", {})
    status.setdefault("daemonEndpoints", {"kubeletEndpoint": {"Port": 0}})
    status["nodeInfo"] = dict.fromkeys(_NODE_INFO, "") | status.get("nodeInfo", {})


def _fill_service(item: JsonObject, old: JsonObject | None, path: str, in_use: Allocations) -> None:
    spec = item.setdefault("spec", {})
    before = old["spec"] if old else {}
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    if spec["sessionAffinity"] == "ClientIP":
        client_ip = spec.setdefault("sessionAffinityConfig", {}).setdefault("clientIP", {})
        client_ip.setdefault("timeoutSeconds", 10800)
    else:
        spec.pop("sessionAffinityConfig", None)
    for port in spec.get("ports", []):
        port.setdefault("protocol", "TCP")
        if port.get("targetPort") in (None, 0, "") and "port" in port:
            port["targetPort"] = port["port"]
    if before:
        _keep_allocated(spec, before)
        _drop_what_the_type_lacks(spec, before)
    _fill_policies(spec)
    name = item["metadata"].get("name", "")
    if spec["type"] != "ExternalName":
        _fill_cluster_ips(spec, before, name, path, in_use)
    _fill_node_ports(spec, name, path, in_use)
    _fill_status(item)


def _fill_policies(spec: JsonObject) -> None:
    if spec["type"] in ("ClusterIP", *_WITH_NODE_PORTS):
        spec.setdefault("internalTrafficPolicy", "Cluster")
    if _externally_accessible(spec):
        spec.setdefault("externalTrafficPolicy", "Cluster")
    if spec["type"] == "LoadBalancer":
        spec.setdefault("allocateLoadBalancerNodePorts", True)


def _fill_status(item: JsonObject) -> None:
    balancer = item.setdefault("status", {}).setdefault("loadBalancer", {})
    for ingress in balancer.get("ingress", []):
        if ingress.get("ip"):
            ingress.setdefault("ipMode", "VIP")


def _externally_accessible(spec: JsonObject) -> bool:
    return spec["type"] in _WITH_NODE_PORTS or (spec["type"] == "ClusterIP" and bool(spec.get("externalIPs")))


def _has_health_check(spec: JsonObject) -> bool:
    return spec["type"] == "LoadBalancer" and spec.get("externalTrafficPolicy") == "Local"


def _keep_allocated(spec: JsonObject, before: JsonObject) -> None:
    """A replacement that leaves out what was allocated keeps it."""
    if spec["type"] != "ExternalName" and before.get("type") != "ExternalName":
        for field in ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"):
            if field in before:
                spec.setdefault(field, before[field])
    if spec["type"] in _WITH_NODE_PORTS and before.get("type") in _WITH_NODE_PORTS:
        known = {
            port.get("name", ""): port["nodePort"] for port in before.get("ports", []) if port.get("nodePort")
        }
        asked = {port.get("nodePort") for port in spec.get("ports", [])}
        for port in spec.get("ports", []):
            if not port.get("nodePort") and known.get(port.get("name", "")) not in (None, *asked):
                port["nodePort"] = known[port.get("name", "")]
    if _has_health_check(spec) and before.get("healthCheckNodePort"):
        spec.setdefault("healthCheckNodePort", before["healthCheckNodePort"])


def _drop_what_the_type_lacks(spec: JsonObject, before: JsonObject) -> None:
    """A service that changes its type sheds what only the old type had, unless the client changed that as well."""
    unused: list[str] = []
    if spec["type"] == "ExternalName":
        unused += ["clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"]
    if not _externally_accessible(spec):
        unused.append("externalTrafficPolicy")
    if not _has_health_check(spec):
        unused.append("healthCheckNodePort")
    if spec["type"] != "LoadBalancer":
        unused.append("allocateLoadBalancerNodePorts")
    for field in unused:
        if field in spec and spec[field] == before.get(field):
            del spec[field]
    if spec["type"] not in _WITH_NODE_PORTS:
        known = {port.get("nodePort") for port in before.get("ports", [])}
        for port in spec.get("ports", []):
            if port.get("nodePort") in known:
                port.pop("nodePort", None)


def _fill_cluster_ips(
    spec: JsonObject, before: JsonObject, name: str, path: str, in_use: Allocations
) -> None:
    addresses = list(spec.get("clusterIPs") or ([spec["clusterIP"]] if spec.get("clusterIP") else []))
    was = before.get("clusterIP")
    if was and before.get("type") != "ExternalName" and spec.get("clusterIP", was) != was:
        why = f'Invalid value: ["{spec["clusterIP"]}"]: may not change once set'
        raise invalid("Service", "", name, "spec.clusterIPs[0]", why)
    headless = addresses == ["None"]
    if headless and not spec.get("selector") and "ipFamilyPolicy" not in spec:
        spec["ipFamilyPolicy"] = "RequireDualStack" if len(in_use.families) > 1 else "SingleStack"
    families = _families(spec, [] if headless else addresses, name, in_use)
    if not headless:
        addresses = _addresses(families, addresses[: len(families)], name, path, in_use)
    spec["clusterIP"], spec["clusterIPs"] = addresses[0], addresses


def _families(spec: JsonObject, addresses: list[str], name: str, in_use: Allocations) -> list[str]:
    """The families of a service, in order: those asked for, those of its addresses, else the cluster's first."""
    of_addresses = ["IPv6" if ":" in address else "IPv4" for address in addresses]
    families = list(spec.get("ipFamilies") or of_addresses or in_use.families[:1])
    policy = spec.setdefault("ipFamilyPolicy", "SingleStack" if len(families) < 2 else "RequireDualStack")
    if policy == "SingleStack":
        families = families[:1]
    else:
        families += [family for family in in_use.families if family not in families]
    missing = [family for family in families if family not in in_use.families]
    if missing or (policy == "RequireDualStack" and len(families) < 2):
        why = f'Invalid value: "{policy}": this cluster has service addresses of {", ".join(in_use.families)} only'
        raise invalid("Service", "", name, "spec.ipFamilyPolicy", why)
    spec["ipFamilies"] = families
    return families


def _addresses(families: list[str], asked: list[str], name: str, path: str, in_use: Allocations) -> list[str]:
    addresses = []
    for index, family in enumerate(families):
        address = asked[index] if index < len(asked) else in_use.next_address(family)
        if address is None:
            raise ApiError(
                500, f"Internal error occurred: failed to allocate a serviceIP: {family} range is full"
            )
        if not is_address(address, family):
            why = f'Invalid value: "{address}": must be a valid {family} address'
            raise invalid("Service", "", name, "spec.clusterIPs", why)
        address = str(ipaddress.ip_address(address))
        if in_use.taken(address, path):
            why = f'Invalid value: ["{address}"]: failed to allocate IP {address}: provided IP is already allocated'
            raise invalid("Service", "", name, "spec.clusterIPs", why)
        addresses.append(address)
    return addresses


def _fill_node_ports(spec: JsonObject, name: str, path: str, in_use: Allocations) -> None:
    ports = spec.get("ports", [])
    given = {port["nodePort"] for port in ports if port.get("nodePort")}
    if _has_health_check(spec) and spec.get("healthCheckNodePort"):
        given.add(spec["healthCheckNodePort"])
    for number in given:
        if in_use.taken(number, path):
            why = f"Invalid value: {number}: provided port is already allocated"
            raise invalid("Service", "", name, "spec.ports[0].nodePort", why)
    wanted = spec["type"] == "NodePort" or spec.get("allocateLoadBalancerNodePorts") is True
    by_number = {port["port"]: port["nodePort"] for port in ports if port.get("nodePort") and "port" in port}
    for port in _without_node_port(ports) if wanted and spec["type"] != "ExternalName" else ():
        # One port number under two protocols, as of a DNS service, gets one node port.
        number = by_number.get(port.get("port")) or _next_port(in_use, given)
        port["nodePort"] = by_number[port.get("port")] = number
        given.add(number)
    if _has_health_check(spec) and not spec.get("healthCheckNodePort"):
        spec["healthCheckNodePort"] = _next_port(in_use, given)


def _without_node_port(ports: Iterable[JsonObject]) -> list[JsonObject]:
    return [port for port in ports if not port.get("nodePort")]


def _next_port(in_use: Allocations, besides: set[int]) -> int:
    number = in_use.next_port(besides)
    if number is None:
        raise ApiError(500, "Internal error occurred: failed to allocate a nodePort: all are in use")
    return number
