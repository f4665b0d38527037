"""The names of chains. They are kube-proxy's, so that one proxy can take over the tables of the other."""

import functools
import hashlib

from pykubeproxy.services.ports import PortName

SERVICES = "KUBE-SERVICES"
EXTERNAL_SERVICES = "KUBE-EXTERNAL-SERVICES"
NODEPORTS = "KUBE-NODEPORTS"
POSTROUTING = "KUBE-POSTROUTING"
MARK_MASQ = "KUBE-MARK-MASQ"
FORWARD = "KUBE-FORWARD"
PROXY_FIREWALL = "KUBE-PROXY-FIREWALL"
CANARY = "KUBE-PROXY-CANARY"
# The kubelet's chain: shared with it, so never flushed and never deleted.
KUBELET_FIREWALL = "KUBE-FIREWALL"

CLUSTER_PREFIX = "KUBE-SVC-"
LOCAL_PREFIX = "KUBE-SVL-"
EXTERNAL_PREFIX = "KUBE-EXT-"
FIREWALL_PREFIX = "KUBE-FW-"
ENDPOINT_PREFIX = "KUBE-SEP-"
# Chains of single services and endpoints: whatever bears such a name in nat is ours to delete.
OWNED_PREFIXES = (CLUSTER_PREFIX, LOCAL_PREFIX, EXTERNAL_PREFIX, FIREWALL_PREFIX, ENDPOINT_PREFIX)


def cluster_chain(name: PortName) -> str:
    """The chain that balances over the backends of traffic policy Cluster."""
    return CLUSTER_PREFIX + _of_port(name)


def local_chain(name: PortName) -> str:
    """The chain that balances over this node's own backends, for traffic policy Local."""
    return LOCAL_PREFIX + _of_port(name)


def external_chain(name: PortName) -> str:
    """The chain for what arrives at a node port, an external IP or a load balancer's IP."""
    return EXTERNAL_PREFIX + _of_port(name)


def firewall_chain(name: PortName) -> str:
    """The chain that lets loadBalancerSourceRanges through."""
    return FIREWALL_PREFIX + _of_port(name)


def branch_chain(text: str) -> str:
    """A chain that other chains are divided into; `text` says which part of which.

    It looks like a service's, so that kube-proxy deletes it when it takes over.
    """
    return CLUSTER_PREFIX + _hash(f"branch {text}")


def endpoint_chain(name: PortName, target: str) -> str:
    """The chain that rewrites the destination to one backend; `target` is "ip:port" or "[ip]:port"."""
    return ENDPOINT_PREFIX + _hash(_text(name) + target)


def is_owned(chain: str) -> bool:
    """Whether a chain of table nat belongs to one service or endpoint, whichever proxy made it."""
    return chain.startswith(OWNED_PREFIXES)


def _text(name: PortName) -> str:
    return f"{name}{name.protocol.lower()}"


@functools.lru_cache(maxsize=4)
def _of_port(name: PortName) -> str:
    """What a service port's chains have in common; they are named one after the other."""
    return _hash(_text(name))


_BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_PAIRS = [first + second for first in _BASE32 for second in _BASE32]


def _hash(text: str) -> str:
    """The first 16 characters of the hash in base32, for a chain's name may have 28 in all.

    That is ten bytes, taken ten bits at a time: base64.b32encode takes half as long again, for every endpoint.
    """
    bits = int.from_bytes(hashlib.sha256(text.encode()).digest()[:10])
    return "".join([_PAIRS[bits >> shift & 1023] for shift in range(70, -1, -10)])
