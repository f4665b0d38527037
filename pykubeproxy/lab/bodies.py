"""The Kubernetes objects that a lab puts at its API server, as JSON values."""

from collections.abc import Mapping, Sequence

from pykubeproxy.lab.api import Object
from pykubeproxy.lab.network import Site
from pykubeproxy.lab.pods import PORT


def service(name: str, port: int, protocols: Sequence[str], spec: Mapping[str, object]) -> Object:
    """A dual-stack Service for the pods of the app of its name; `spec` wins over what is given here."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "selector": {"app": name},
            "ipFamilyPolicy": "RequireDualStack",
            "ipFamilies": ["IPv4", "IPv6"],
            "ports": [
                {"name": protocol.lower(), "protocol": protocol, "port": port, "targetPort": PORT}
                for protocol in protocols
            ],
            **spec,
        },
    }


def node(site: Site) -> Object:
    """The Node object of a node of the lab."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": site.name,
            "labels": {"kubernetes.io/hostname": site.name, "topology.kubernetes.io/zone": site.zone},
        },
        "spec": {"podCIDR": site.pod_cidrs[0], "podCIDRs": list(site.pod_cidrs)},
        "status": {
            "addresses": [
                *({"type": "InternalIP", "address": address} for address in site.addresses),
                {"type": "Hostname", "address": site.name},
            ]
        },
    }


def kubeconfig(server: str) -> str:
    """A kubeconfig for a server that asks for no credentials."""
    return (
        "apiVersion: v1\nkind: Config\ncurrent-context: lab\n"
        f"clusters: [{{name: lab, cluster: {{server: '{server}'}}}}]\n"
        "users: [{name: lab, user: {}}]\n"
        "contexts: [{name: lab, context: {cluster: lab, user: lab}}]\n"
    )
