"""Chain names: those of kube-proxy, so that either proxy can take over the tables of the other."""

import functools
import hashlib
import re

from pykubeproxy.services.ports import PortName

SERVICES = "KUBE-SERVICES"
EXTERNAL_SERVICES = "KUBE-EXTERNAL-SERVICES"
NODEPORTS = "KUBE-NODEPORTS"
POSTROUTING = "KUBE-POSTROUTING"
MARK_MASQ = "KUBE-MARK-MASQ"
FORWARD = "KUBE-FORWARD"
PROXY_FIREWALL = "KUBE-PROXY-FIREWALL"
CANARY = "KUBE-PROXY-CANARY"
# Shared with the kubelet: never flushed, and deleted only by cleanup.
KUBELET_FIREWALL = "KUBE-FIREWALL"

CLUSTER_PREFIX = "KUBE-SVC-"
LOCAL_PREFIX = "KUBE-SVL-"
EXTERNAL_PREFIX = "KUBE-EXT-"
FIREWALL_PREFIX = "KUBE-FW-"
ENDPOINT_PREFIX = "KUBE-SEP-"
# Chains of single services and endpoints in table nat, and of dispatch trees in nat and filter. Any chain of these tables
# with such a name may be deleted.
OWNED_PREFIXES = (CLUSTER_PREFIX, LOCAL_PREFIX, EXTERNAL_PREFIX, FIREWALL_PREFIX, ENDPOINT_PREFIX)


# The tables of kube-proxy in nftables mode, and its chains of a service port or endpoint, which name it.
NFT_TABLES = ("ip kube-proxy", "ip6 kube-proxy")
_NFT_CHAIN = re.compile(
    r"(?:service|local|external|firewall|endpoint)-[A-Z2-7]{8}-([^/]+/[^/]+)/(?:tcp|udp|sctp)/(.*?)(?:__.*)?"
)


def nft_title(chain: str) -> str:
    """Return the service port of a chain of kube-proxy in nftables mode: "ns/name:port"; "" for other chains."""
    match = _NFT_CHAIN.fullmatch(chain)
    return ":".join(filter(None, match.groups())) if match else ""


def cluster_chain(name: PortName) -> str:
    """Return the chain that balances over the endpoints of traffic policy Cluster."""
    return CLUSTER_PREFIX + _port_hash(name)


def local_chain(name: PortName) -> str:
    """Return the chain that balances over the local endpoints, for traffic policy Local."""
    return LOCAL_PREFIX + _port_hash(name)


def external_chain(name: PortName) -> str:
    """Return the chain for traffic to a node port, an external IP or a load balancer IP."""
    return EXTERNAL_PREFIX + _port_hash(name)


def firewall_chain(name: PortName) -> str:
    """Return the chain that admits loadBalancerSourceRanges."""
    return FIREWALL_PREFIX + _port_hash(name)


def branch_chain(text: str) -> str:
    """Return the chain for one part of another chain; `text` identifies the part.

    It has the prefix of a service chain, so kube-proxy deletes it from table nat on takeover.
    """
    return CLUSTER_PREFIX + _hash(f"branch {text}")


def endpoint_chain(name: PortName, target: str) -> str:
    """Return the chain that DNATs to one endpoint; `target` is "ip:port" or "[ip]:port"."""
    return ENDPOINT_PREFIX + _hash(_text(name) + target)


def is_owned(chain: str) -> bool:
    """Return whether a chain of table nat or filter belongs to a single service or endpoint, of any proxy, or to a tree."""
    return chain.startswith(OWNED_PREFIXES)


def is_endpoint_chain(chain: str) -> bool:
    """Return whether a chain belongs to a single endpoint; it jumps to no chain of a service or endpoint."""
    return chain.startswith(ENDPOINT_PREFIX)


# Both are cached because callers name the chains of a service port one after the other.
@functools.lru_cache(maxsize=4)
def _text(name: PortName) -> str:
    return f"{name}{name.protocol.lower()}"


@functools.lru_cache(maxsize=4)
def _port_hash(name: PortName) -> str:
    return _hash(_text(name))


_BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_PAIRS = [first + second for first in _BASE32 for second in _BASE32]


def _hash(text: str) -> str:
    """Return the first 16 characters of the hash in base32; chain names may have 28 characters.

    Encode ten bits at a time: base64.b32encode takes 50 % longer, and every endpoint needs a hash.
    """
    bits = int.from_bytes(hashlib.sha256(text.encode()).digest()[:10])
    return "".join([_PAIRS[bits >> shift & 1023] for shift in range(70, -1, -10)])
