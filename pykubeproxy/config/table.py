"""The table of settings, the only source of flags, fields, defaults, checks, help, /configz and /flagz.

To add a setting, add an entry to OURS and an attribute to Config. /configz has the order of the table.
"""

import enum
from dataclasses import dataclass

from pykubeproxy.config.kinds import (
    ADDRESS,
    ANY_DURATION,
    BOOL,
    CLUSTER_CIDRS,
    COUNT,
    DURATION,
    FLUSH_FREQUENCY,
    GATES,
    HOSTNAME,
    IP,
    NAME,
    NODE_PORT_ADDRESSES,
    NUMBER,
    OPTIONAL_DURATION,
    QUANTITY,
    STRING,
    TEXTS,
    VERBOSITY,
    VMODULE,
    ValueKind,
    choice,
    integer,
    of_text,
)
from pykubeproxy.config.model import (
    EMULATED,
    DetectLocalMode,
    Dispatch,
    FeatureGates,
    IptablesBackend,
    LogFormat,
)


class Zero(enum.Enum):
    """The meaning of 0, or of empty text. kubeadm writes them into its ConfigMap for "use the default"."""

    COUNTS = "a value like any other"
    DEFAULT_IN_FILE = "the default in a file, a value as a flag"
    DEFAULT = "the default"


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One setting.

    field: the path in the configuration file; empty if only a flag sets it.
    flag: the flag without dashes; empty if only the file sets it.
    default: the default, of this kind.
    attribute: the path in Config; empty if the setting has no effect.
    beside_config: whether the flag overrides the configuration file.
    omitted: whether /configz omits the default (Go's omitempty).
    dropped: whether /configz always has the default, because kube-proxy drops the values of other modes.
    instead: the replacement of a deprecated setting.
    optional: whether an unknown value in the file is ignored with a warning.
    strict: whether an invalid value is an error although the setting has no effect.
    """

    field: str
    flag: str
    kind: ValueKind
    default: object
    help: str
    attribute: str = ""
    zero: Zero = Zero.COUNTS
    beside_config: bool = False
    omitted: bool = False
    dropped: bool = False
    instead: str = ""
    optional: bool = False
    strict: bool = False

    @property
    def ignored(self) -> bool:
        """Whether the setting is accepted without effect: it is for another proxy mode or operating system."""
        return not self.attribute and not self.instead

    @property
    def tolerant(self) -> bool:
        """Whether an invalid value in the file is a warning, and the default counts."""
        return self.optional or (self.ignored and not self.strict)


QPS = 5.0
BURST = 10
HEALTH_PORT = 10256
METRICS_PORT = 10249


def _mode(text: str) -> str:
    if text not in ("", "iptables"):
        raise ValueError("must be iptables or empty; pykubeproxy has no other mode")
    return text


def _hidden_metrics(text: str) -> str:
    major, _, minor = EMULATED.partition(".")
    previous = f"{major}.{int(minor) - 1}"
    if text not in ("", previous):
        raise ValueError(f"must be {previous} or empty")
    return text


_INT32 = integer(-(2**31), 2**31 - 1)
_PROTOBUF = "application/vnd.kubernetes.protobuf"

# fmt: off
# field, flag, kind, default / help / attribute, what zero means and the rest
KUBE_PROXY: tuple[Setting, ...] = (
    Setting("featureGates", "feature-gates", GATES, FeatureGates(()),
            "Feature gates. AllowServiceExternalIPs=false ignores externalIPs; others have no effect.",
            "feature_gates", omitted=True),
    Setting("clientConnection.kubeconfig", "kubeconfig", STRING, "",
            "The kubeconfig file for the API server; without one, use the pod's service account.",
            "client.kubeconfig"),
    Setting("", "master", STRING, "",
            "The API server's URL; overrides the kubeconfig.",
            "client.master", beside_config=True),
    Setting("clientConnection.acceptContentTypes", "", STRING, "",
            "The content types to accept from the API server; no effect, always JSON.",
            "client.accept_content_types"),
    Setting("clientConnection.contentType", "kube-api-content-type", STRING, _PROTOBUF,
            "The content type of requests to the API server; no effect, always JSON.",
            "client.content_type", Zero.DEFAULT_IN_FILE),
    Setting("clientConnection.qps", "kube-api-qps", NUMBER, QPS,
            "The maximum number of requests per second to the API server; negative means no limit.",
            "client.qps", Zero.DEFAULT_IN_FILE),
    Setting("clientConnection.burst", "kube-api-burst", COUNT, BURST,
            "The maximum burst of requests to the API server.",
            "client.burst", Zero.DEFAULT_IN_FILE),
    Setting("logging.format", "logging-format", choice(LogFormat), LogFormat.TEXT,
            "The format of log lines.",
            "logging.format", Zero.DEFAULT_IN_FILE, beside_config=True, optional=True),
    Setting("logging.flushFrequency", "log-flush-frequency", FLUSH_FREQUENCY, 5.0,
            "How often to flush logs; no effect, each line is flushed.",
            zero=Zero.DEFAULT_IN_FILE, beside_config=True),
    Setting("logging.verbosity", "v", VERBOSITY, 0,
            "The log verbosity: 2 logs each sync, 4 each endpoint.",
            "logging.verbosity", beside_config=True, optional=True),
    Setting("logging.vmodule", "vmodule", VMODULE, (),
            "Verbosity for single source files of kube-proxy.", beside_config=True, omitted=True),
    Setting("logging.options.text.splitStream", "log-text-split-stream", BOOL, False,
            "Write errors to stderr and the rest to stdout, as text.", beside_config=True, omitted=True),
    Setting("logging.options.text.infoBufferSize", "log-text-info-buffer-size", QUANTITY, "0",
            "The buffer size of split text logs.", beside_config=True),
    Setting("logging.options.json.splitStream", "log-json-split-stream", BOOL, False,
            "Write errors to stderr and the rest to stdout, as JSON.", beside_config=True, omitted=True),
    Setting("logging.options.json.infoBufferSize", "log-json-info-buffer-size", QUANTITY, "0",
            "The buffer size of split JSON logs.", beside_config=True),
    Setting("hostnameOverride", "hostname-override", HOSTNAME, "",
            "This node's name in the cluster; the default is the host name.",
            "hostname_override", Zero.DEFAULT, beside_config=True),
    Setting("bindAddress", "bind-address", IP, "0.0.0.0",  # noqa: S104  nothing is bound to it
            "The node's IP address; its family is the primary one. Nothing listens on it.",
            "bind_address", Zero.DEFAULT),
    Setting("healthzBindAddress", "healthz-bind-address", ADDRESS, f"0.0.0.0:{HEALTH_PORT}",
            "Where to serve /healthz, /livez and /readyz.",
            "health_address", Zero.DEFAULT),
    Setting("metricsBindAddress", "metrics-bind-address", ADDRESS, f"127.0.0.1:{METRICS_PORT}",
            "Where to serve /metrics, /configz and /statusz.",
            "metrics_address", Zero.DEFAULT),
    Setting("bindAddressHardFail", "bind-address-hard-fail", BOOL, False,
            "Exit if a listen address is in use, instead of retrying.",
            "bind_address_hard_fail"),
    Setting("enableProfiling", "profiling", BOOL, False,
            "Serve Go profiles on the metrics address; no effect."),
    Setting("showHiddenMetricsForVersion", "show-hidden-metrics-for-version", of_text("VERSION", _hidden_metrics), "",
            "The release whose hidden metrics to show, the one before that of kube-proxy; no effect.", strict=True),
    Setting("mode", "proxy-mode", of_text("iptables", _mode), "iptables",
            "The proxy mode; iptables is the only one.",
            "mode", Zero.DEFAULT),
    Setting("iptables.masqueradeBit", "iptables-masquerade-bit", integer(0, 31), 14,
            "The bit of the packet mark, 0 to 31, that requests masquerading.",
            "iptables.masquerade_bit"),
    Setting("iptables.masqueradeAll", "masquerade-all", BOOL, False,
            "Masquerade all traffic to cluster IPs.",
            "iptables.masquerade_all"),
    Setting("iptables.localhostNodePorts", "iptables-localhost-nodeports", BOOL, True,
            "Serve node ports on 127.0.0.1 too (IPv4 only).",
            "iptables.localhost_node_ports"),
    Setting("iptables.syncPeriod", "iptables-sync-period", DURATION, 30.0,
            "How often to check the rules, and the longest time until a retry. Greater than 0.",
            "iptables.sync_period", Zero.DEFAULT_IN_FILE),
    Setting("iptables.minSyncPeriod", "iptables-min-sync-period", DURATION, 1.0,
            "The minimum time between two syncs; as a flag, 0 writes each change at once.",
            "iptables.min_sync_period", Zero.DEFAULT_IN_FILE),
    Setting("ipvs.syncPeriod", "", ANY_DURATION, 0.0, "How often ipvs mode syncs.", dropped=True),
    Setting("ipvs.minSyncPeriod", "", ANY_DURATION, 0.0, "The minimum time between two syncs in ipvs mode.",
            dropped=True),
    Setting("ipvs.scheduler", "ipvs-scheduler", STRING, "", "The scheduler of ipvs mode."),
    Setting("ipvs.excludeCIDRs", "ipvs-exclude-cidrs", TEXTS, None, "CIDRs that ipvs mode does not clean up."),
    Setting("ipvs.strictARP", "ipvs-strict-arp", BOOL, False, "Strict ARP in ipvs mode."),
    Setting("ipvs.tcpTimeout", "ipvs-tcp-timeout", ANY_DURATION, 0.0, "The idle TCP timeout of ipvs mode."),
    Setting("ipvs.tcpFinTimeout", "ipvs-tcpfin-timeout", ANY_DURATION, 0.0, "The TCP FIN timeout of ipvs mode."),
    Setting("ipvs.udpTimeout", "ipvs-udp-timeout", ANY_DURATION, 0.0, "The UDP timeout of ipvs mode."),
    Setting("nftables.masqueradeBit", "", _INT32, 14, "The mark bit of nftables mode."),
    Setting("nftables.masqueradeAll", "", BOOL, False, "Masquerade everything in nftables mode.", dropped=True),
    Setting("nftables.syncPeriod", "", ANY_DURATION, 0.0, "How often nftables mode syncs.", dropped=True),
    Setting("nftables.minSyncPeriod", "", ANY_DURATION, 0.0, "The minimum time between two syncs in nftables mode.",
            dropped=True),
    Setting("winkernel.networkName", "", STRING, "", "The HNS network, on Windows."),
    Setting("winkernel.sourceVip", "", STRING, "", "The source VIP, on Windows."),
    Setting("winkernel.enableDSR", "", BOOL, False, "Direct server return, on Windows."),
    Setting("winkernel.rootHnsEndpointName", "", STRING, "", "The root HNS endpoint, on Windows."),
    Setting("winkernel.forwardHealthCheckVip", "", BOOL, False, "Health checks by the VIP, on Windows."),
    Setting("detectLocalMode", "detect-local-mode", choice(DetectLocalMode), DetectLocalMode.CLUSTER_CIDR,
            "How to detect traffic from this node's pods.",
            "detect_local.mode", Zero.DEFAULT),
    Setting("detectLocal.bridgeInterface", "pod-bridge-interface", NAME, "",
            "The pods' bridge for mode BridgeInterface.",
            "detect_local.bridge_interface"),
    Setting("detectLocal.interfaceNamePrefix", "pod-interface-name-prefix", NAME, "",
            "The prefix of the pods' interfaces for mode InterfaceNamePrefix.",
            "detect_local.interface_name_prefix"),
    Setting("clusterCIDR", "cluster-cidr", CLUSTER_CIDRS, (),
            "The pods' CIDR for mode ClusterCIDR; for dual-stack, one per family.",
            "detect_local.cluster_cidrs"),
    Setting("nodePortAddresses", "nodeport-addresses", NODE_PORT_ADDRESSES, None,
            "CIDRs of the addresses that serve node ports, primary for the node's IPs, localhost or all; empty means all.",
            "node_port_addresses"),
    Setting("oomScoreAdj", "oom-score-adj", integer(-1000, 1000), -999,
            "The oom_score_adj of this process, -1000 to 1000.",
            "oom_score_adj"),
    Setting("conntrack.maxPerCore", "conntrack-max-per-core", COUNT, 32768,
            "The conntrack limit per CPU core; 0 leaves the limit unchanged.",
            "conntrack.max_per_core"),
    Setting("conntrack.min", "conntrack-min", COUNT, 131072,
            "The minimum conntrack limit, regardless of CPU cores.",
            "conntrack.min"),
    Setting("conntrack.tcpEstablishedTimeout", "conntrack-tcp-timeout-established", OPTIONAL_DURATION, 86400.0,
            "The conntrack timeout of idle TCP connections; 0 leaves it unchanged.",
            "conntrack.tcp_established_timeout"),
    Setting("conntrack.tcpCloseWaitTimeout", "conntrack-tcp-timeout-close-wait", OPTIONAL_DURATION, 3600.0,
            "The conntrack timeout of half-closed TCP connections; 0 leaves it unchanged.",
            "conntrack.tcp_close_wait_timeout"),
    Setting("conntrack.tcpBeLiberal", "conntrack-tcp-be-liberal", BOOL, False,
            "Accept TCP packets outside the window.",
            "conntrack.tcp_be_liberal"),
    Setting("conntrack.udpTimeout", "conntrack-udp-timeout", DURATION, 0.0,
            "The conntrack timeout of UDP flows without reply; 0 leaves it unchanged.",
            "conntrack.udp_timeout"),
    Setting("conntrack.udpStreamTimeout", "conntrack-udp-timeout-stream", DURATION, 0.0,
            "The conntrack timeout of UDP flows with replies; 0 leaves it unchanged.",
            "conntrack.udp_stream_timeout"),
    Setting("configSyncPeriod", "config-sync-period", DURATION, 900.0,
            "How often to refresh objects from the API server; no effect. Greater than 0.",
            "config_sync_period", Zero.DEFAULT_IN_FILE),
    Setting("portRange", "", STRING, "", "The node ports of the removed userspace mode.", dropped=True),
    Setting("windowsRunAsService", "", BOOL, False, "Run as a service, on Windows.", omitted=True),
    Setting("", "healthz-port", _INT32, HEALTH_PORT,
            "The port of --healthz-bind-address if it has none; 0 turns the server off.",
            instead="healthz-bind-address"),
    Setting("", "metrics-port", _INT32, METRICS_PORT,
            "The port of --metrics-bind-address if it has none; 0 turns the server off.",
            instead="metrics-bind-address"),
    Setting("", "ipvs-sync-period", ANY_DURATION, 30.0, "How often ipvs mode syncs."),
    Setting("", "ipvs-min-sync-period", ANY_DURATION, 1.0, "The minimum time between two syncs in ipvs mode."),
    Setting("", "boot-id-file", STRING, "/proc/sys/kernel/random/boot_id", "The file with the boot ID."),
    Setting("", "machine-id-file", STRING, "/etc/machine-id,/var/lib/dbus/machine-id",
            "Files with the machine ID."),
)

OURS: tuple[Setting, ...] = (
    Setting("pykubeproxy.iptablesBackend", "iptables-backend", choice(IptablesBackend), IptablesBackend.AUTO,
            "The iptables variant that writes the rules; auto selects the one this node uses.",
            "iptables_backend", Zero.DEFAULT, beside_config=True, omitted=True),
    Setting("pykubeproxy.dispatch", "dispatch", choice(Dispatch), Dispatch.AUTO,
            "How to dispatch packets to services: flat (as kube-proxy), tree, or auto (tree above 200 "
            "addresses or 1000 rules).",
            "dispatch", Zero.DEFAULT, beside_config=True, omitted=True, optional=True),
    Setting("pykubeproxy.maxServicePairs", "max-service-pairs", integer(0, 2**31 - 1), 50_000,
            "Do not serve a Service with more pairs of a port and an endpoint, external IP, load balancer IP or source"
            " range in an address family; 0 allows any number.",
            "max_service_pairs", beside_config=True, omitted=True),
    Setting("pykubeproxy.maxAffinityLists", "max-affinity-lists", integer(0, 2**31 - 1), 500,
            "Serve a Service without session affinity if it and older Services of its namespace need more lists of"
            " clients, one for each port and endpoint; 0 allows any number.",
            "max_affinity_lists", beside_config=True, omitted=True),
)

SETTINGS = KUBE_PROXY + OURS

# Flags that select an action; they have no field in the configuration file.
ACTIONS: tuple[Setting, ...] = (
    Setting("", "config", STRING, "", "The configuration file, a KubeProxyConfiguration."),
    Setting("", "write-config-to", STRING, "", "Write the configuration to this file and exit."),
    Setting("", "init-only", BOOL, False, "Do the setup that requires a privileged container, and exit."),
    Setting("", "cleanup", BOOL, False, "Remove what this proxy and all modes of kube-proxy leave, and exit."),
    Setting("", "version", BOOL, False, "Print the version and exit."),
)
# fmt: on
