"""The configuration as one frozen value."""

import enum
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

# The release of kube-proxy whose interface the agent has.
EMULATED = "1.36"


class ConfigError(Exception):
    """An invalid setting; `str()` is one line with the setting, its value and the allowed values.

    `field` is the path in the configuration file ("iptables.syncPeriod") or the flag ("--iptables-sync-period") that
    set the value, or empty if the file is unusable. `problem` is the line without it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.problem = message


class IptablesBackend(enum.StrEnum):
    """The iptables variant that writes the rules; AUTO selects the one the node uses."""

    AUTO = "auto"
    NFT = "nft"
    LEGACY = "legacy"


class Dispatch(enum.StrEnum):
    """How packets are dispatched to services: rule by rule as in kube-proxy, or by a tree."""

    AUTO = "auto"
    FLAT = "flat"
    TREE = "tree"


class DetectLocalMode(enum.StrEnum):
    """How traffic from this node's pods is detected."""

    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"


class LogFormat(enum.StrEnum):
    """The format of log lines."""

    TEXT = "text"
    JSON = "json"


class ListenAddress(NamedTuple):
    """An IP address and port to listen on. `str()` is "10.0.0.1:80" or "[::1]:80"."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class FeatureGates(msgspec.Struct, frozen=True):
    """All given feature gates, sorted by name."""

    gates: tuple[tuple[str, bool], ...]

    def __str__(self) -> str:
        return ",".join(f"{name}={str(on).lower()}" for name, on in self.gates)

    @property
    def allow_service_external_ips(self) -> bool:
        """Whether to serve Services' externalIPs."""
        return dict(self.gates).get("AllowServiceExternalIPs", True)

    def serves_page(self, gate: str) -> bool:
        """Return whether a gate of a page, ComponentFlagz or ComponentStatusz, is on; both are beta."""
        gates = dict(self.gates)
        return gates.get(gate, gates.get("AllBeta", True))


class ClientConnection(msgspec.Struct, frozen=True):
    """The connection to the API server. Without `kubeconfig` and `master`, use the pod's service account.

    `master` is a URL that overrides the kubeconfig's. `qps` and `burst` limit requests; a negative `qps` means no limit.
    The content types have no effect.
    """

    kubeconfig: str
    master: str
    qps: float
    burst: int
    content_type: str
    accept_content_types: str


class Logging(msgspec.Struct, frozen=True):
    """Log format and verbosity."""

    format: LogFormat
    verbosity: int


class IptablesSettings(msgspec.Struct, frozen=True):
    """How to build rules and how often to write them.

    Periods are seconds; 0 <= min_sync_period <= sync_period and sync_period > 0. `masquerade_bit` is the bit (0 to 31)
    of the packet mark that requests masquerading.
    """

    masquerade_bit: int
    masquerade_all: bool
    localhost_node_ports: bool
    sync_period: float
    min_sync_period: float


class DetectLocal(msgspec.Struct, frozen=True):
    """How to detect local traffic. Only the field that `mode` uses is checked; the others may have any value.

    In mode ClusterCIDR, `cluster_cidrs` are canonical, at most one per family. Else the interface is a valid name.
    """

    mode: DetectLocalMode
    cluster_cidrs: tuple[str, ...]
    bridge_interface: str
    interface_name_prefix: str


class Conntrack(msgspec.Struct, frozen=True):
    """Connection tracking in the kernel. Timeouts are seconds; 0 leaves a value unchanged."""

    max_per_core: int
    min: int
    tcp_established_timeout: float
    tcp_close_wait_timeout: float
    tcp_be_liberal: bool
    udp_timeout: float
    udp_stream_timeout: float


class Config(msgspec.Struct, frozen=True):
    """The configuration, checked and in canonical form. `load` creates it.

    hostname_override: lower case; empty means the host name.
    bind_address: the node's IP address; unspecified (0.0.0.0 or ::) means that of the Node object.
    health_address, metrics_address: None means no such server.
    node_port_addresses: canonical CIDRs, and "primary" for the node's own; empty means all addresses of the node.
    max_service_pairs: see `Oversized`; 0 means any number.
    max_affinity_lists: see `AffinityShares.unkept_lists`; 0 means any number.
    config_sync_period: seconds.
    document: the KubeProxyConfiguration for /configz, with values as given, and the defaults of all others.
    """

    client: ClientConnection
    logging: Logging
    hostname_override: str
    bind_address: str
    health_address: ListenAddress | None
    metrics_address: ListenAddress | None
    bind_address_hard_fail: bool
    mode: str
    iptables: IptablesSettings
    iptables_backend: IptablesBackend
    dispatch: Dispatch
    max_service_pairs: int
    max_affinity_lists: int
    detect_local: DetectLocal
    node_port_addresses: tuple[str, ...]
    oom_score_adj: int
    conntrack: Conntrack
    config_sync_period: float
    feature_gates: FeatureGates
    document: Mapping[str, object]
