"""Config: everything that steers the program, as one frozen value."""

import enum
from typing import NamedTuple

import msgspec


class ConfigError(Exception):
    """A setting that cannot be used; `str()` is one line with the setting, its value and what is allowed.

    `field` is the path in the configuration file ("iptables.syncPeriod") or the flag
    ("--iptables-sync-period"), whichever the value came by; it is empty when the file as a whole cannot be
    read.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message


class Backend(enum.Enum):
    """Which iptables writes the rules; AUTO leaves it to what the node already uses."""

    AUTO = "auto"
    NFT = "nft"
    LEGACY = "legacy"


class Dispatch(enum.Enum):
    """How packets find their service: by one chain after the other rule by rule, as with kube-proxy, or by a tree."""

    AUTO = "auto"
    FLAT = "flat"
    TREE = "tree"


class DetectLocalMode(enum.Enum):
    """How traffic from this node's own pods is told from other traffic."""

    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"


class LogFormat(enum.Enum):
    """How log lines are written."""

    TEXT = "text"
    JSON = "json"


class Address(NamedTuple):
    """Where a server listens: an IP address and a port. `str()` is "10.0.0.1:80" or "[::1]:80"."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class FeatureGates(msgspec.Struct, frozen=True):
    """Feature gates as given, sorted by name; those that mean nothing here are kept all the same."""

    gates: tuple[tuple[str, bool], ...]

    @property
    def allow_service_external_ips(self) -> bool:
        """Whether Services' externalIPs are served; AllowServiceExternalIPs=false leaves them out."""
        return dict(self.gates).get("AllowServiceExternalIPs", True)


class Client(msgspec.Struct, frozen=True):
    """How the API server is reached. Without `kubeconfig` and `master`: by the pod's service account.

    `master` is a URL that overrides the kubeconfig's. `qps` and `burst` limit requests; `content_type` and
    `accept_content_types` are what the file says, whatever encoding is spoken.
    """

    kubeconfig: str
    master: str
    qps: float
    burst: int
    content_type: str
    accept_content_types: str


class Logging(msgspec.Struct, frozen=True):
    """What is logged: the more `verbosity`, the more."""

    format: LogFormat
    verbosity: int


class Iptables(msgspec.Struct, frozen=True):
    """How rules are made and how often they are written.

    Periods are seconds; 0 <= min_sync_period <= sync_period and sync_period > 0.
    `masquerade_bit` is the bit (0 to 31) of the packet mark that asks for masquerading.
    """

    masquerade_bit: int
    masquerade_all: bool
    localhost_node_ports: bool
    sync_period: float
    min_sync_period: float


class DetectLocal(msgspec.Struct, frozen=True):
    """How local traffic is recognised. `cluster_cidrs` are canonical, at most one for each family.

    The interface that `mode` needs is never empty; the others may hold values that are not used.
    """

    mode: DetectLocalMode
    cluster_cidrs: tuple[str, ...]
    bridge_interface: str
    interface_name_prefix: str


class Conntrack(msgspec.Struct, frozen=True):
    """What is set in the kernel's connection tracking. Timeouts are seconds; 0 leaves a value alone."""

    max_per_core: int
    min: int
    tcp_established_timeout: float
    tcp_close_wait_timeout: float
    tcp_be_liberal: bool
    udp_timeout: float
    udp_stream_timeout: float


class Config(msgspec.Struct, frozen=True):
    """Everything that steers the program. Made by `load`, which checks it; all values are in canonical form.

    hostname_override: lower case; empty means the host's own name.
    bind_address: the address to take for the node's own; unspecified (0.0.0.0 or ::) means the Node object's.
    health_address, metrics_address: None means no such server.
    node_port_addresses: canonical CIDRs, or "primary" alone; empty means every address of the node.
    config_sync_period: seconds.
    ignored: (field path, value) of accepted settings that have no effect here and differ from their default.
    """

    client: Client
    logging: Logging
    hostname_override: str
    bind_address: str
    health_address: Address | None
    metrics_address: Address | None
    bind_address_hard_fail: bool
    mode: str
    iptables: Iptables
    iptables_backend: Backend
    dispatch: Dispatch
    detect_local: DetectLocal
    node_port_addresses: tuple[str, ...]
    oom_score_adj: int
    conntrack: Conntrack
    config_sync_period: float
    feature_gates: FeatureGates
    ignored: tuple[tuple[str, object], ...]
