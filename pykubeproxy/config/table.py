"""The table of settings. Flags, fields, defaults, checks, help, /configz and /flagz come from it.

A further setting of our own takes one entry in OURS and one attribute in Config. The order is /configz's.
"""

from pykubeproxy.config.kinds import (
    BOOL,
    COUNT,
    DURATION,
    DURATION_OR_NANOSECONDS,
    GATES,
    NUMBER,
    QUANTITY,
    STRING,
    VMODULE,
    choice,
    integer,
    of_text,
)
from pykubeproxy.config.model import Address, Backend, DetectLocalMode, Dispatch, FeatureGates, LogFormat
from pykubeproxy.config.network import (
    CIDRS,
    CLUSTER_CIDRS,
    IP,
    NODE_PORT_ADDRESSES,
    address,
    interface,
)
from pykubeproxy.config.settings import Setting, Zero

HEALTH_PORT = 10256
METRICS_PORT = 10249
HEALTH_DEFAULT = Address("0.0.0.0", HEALTH_PORT)  # noqa: S104  kubelets and balancers ask from outside
METRICS_DEFAULT = Address("127.0.0.1", METRICS_PORT)


def _hostname(text: str) -> str:
    if text and not text.strip():
        raise ValueError("must be a node's name or empty")
    return text.strip().lower()


def _mode(text: str) -> str:
    if text not in ("", "iptables"):
        raise ValueError("must be iptables or empty; pykubeproxy works through iptables alone")
    return text


_INT32 = integer(-(2**31), 2**31 - 1)
_PORT = integer(0, 65535)
_PROTOBUF = "application/vnd.kubernetes.protobuf"

# fmt: off
# field, flag, kind, default / help / attribute, what zero means and the rest
KUBE_PROXY: tuple[Setting, ...] = (
    Setting("featureGates", "feature-gates", GATES, FeatureGates(()),
            "Feature gates. AllowServiceExternalIPs=false leaves externalIPs unserved; others do nothing.",
            "feature_gates", omitted=True),
    Setting("clientConnection.kubeconfig", "kubeconfig", STRING, "",
            "The kubeconfig file to reach the API server with; without one, the pod's service account.",
            "client.kubeconfig"),
    Setting("", "master", STRING, "",
            "The API server's URL, in place of the one in the kubeconfig.",
            "client.master", beside_config=True),
    Setting("clientConnection.acceptContentTypes", "", STRING, "",
            "The content types to accept from the API server; without effect, as it is asked for JSON.",
            "client.accept_content_types"),
    Setting("clientConnection.contentType", "kube-api-content-type", STRING, _PROTOBUF,
            "The content type of requests to the API server; without effect, as JSON is spoken.",
            "client.content_type", Zero.DEFAULT),
    Setting("clientConnection.qps", "kube-api-qps", NUMBER, 5.0,
            "The requests a second that the API server gets at most.",
            "client.qps", Zero.DEFAULT),
    Setting("clientConnection.burst", "kube-api-burst", COUNT, 10,
            "The requests that the API server gets at once at most.",
            "client.burst", Zero.DEFAULT),
    Setting("logging.format", "logging-format", choice(LogFormat), LogFormat.TEXT,
            "How log lines are written.",
            "logging.format", Zero.DEFAULT, beside_config=True),
    Setting("logging.flushFrequency", "log-flush-frequency", DURATION_OR_NANOSECONDS, 5.0,
            "How often logs are flushed; here every line is, at once.",
            zero=Zero.DEFAULT, beside_config=True),
    Setting("logging.verbosity", "v", COUNT, 0,
            "How much is logged: 2 tells of each sync, 4 of each endpoint.",
            "logging.verbosity", beside_config=True),
    Setting("logging.vmodule", "vmodule", VMODULE, (),
            "Log levels for single source files of kube-proxy.", beside_config=True, omitted=True),
    Setting("logging.options.text.splitStream", "log-text-split-stream", BOOL, False,
            "Errors to stderr, the rest to stdout, as text.", beside_config=True, omitted=True),
    Setting("logging.options.text.infoBufferSize", "log-text-info-buffer-size", QUANTITY, "0",
            "The buffer of split text logs.", beside_config=True),
    Setting("logging.options.json.splitStream", "log-json-split-stream", BOOL, False,
            "Errors to stderr, the rest to stdout, as JSON.", beside_config=True, omitted=True),
    Setting("logging.options.json.infoBufferSize", "log-json-info-buffer-size", QUANTITY, "0",
            "The buffer of split JSON logs.", beside_config=True),
    Setting("hostnameOverride", "hostname-override", of_text("NAME", _hostname), "",
            "This node's name in the cluster; without one, the host's own name.",
            "hostname_override", Zero.DEFAULT, beside_config=True),
    Setting("bindAddress", "bind-address", IP, "0.0.0.0",  # noqa: S104  nothing is bound to it
            "The address to take for the node's own, its family for the primary one. Nothing listens on it.",
            "bind_address", Zero.DEFAULT),
    Setting("healthzBindAddress", "healthz-bind-address", address(HEALTH_PORT), HEALTH_DEFAULT,
            "Where /healthz and /livez are served; as a flag, empty turns them off.",
            "health_address", Zero.DEFAULT_IN_FILE),
    Setting("metricsBindAddress", "metrics-bind-address", address(METRICS_PORT), METRICS_DEFAULT,
            "Where /metrics and its like are served; as a flag, empty turns them off.",
            "metrics_address", Zero.DEFAULT_IN_FILE),
    Setting("bindAddressHardFail", "bind-address-hard-fail", BOOL, False,
            "Exit if an address to listen on is taken, rather than try again.",
            "bind_address_hard_fail"),
    Setting("enableProfiling", "profiling", BOOL, False,
            "Go profiles on the metrics address; this program has none to serve."),
    Setting("showHiddenMetricsForVersion", "show-hidden-metrics-for-version", STRING, "",
            "The release whose hidden metrics to show; no metric is hidden here."),
    Setting("mode", "proxy-mode", of_text("iptables", _mode), "iptables",
            "The proxy mode: iptables, the only one.",
            "mode", Zero.DEFAULT),
    Setting("iptables.masqueradeBit", "iptables-masquerade-bit", integer(0, 31), 14,
            "The bit of the packet mark, 0 to 31, that asks for masquerading.",
            "iptables.masquerade_bit"),
    Setting("iptables.masqueradeAll", "masquerade-all", BOOL, False,
            "Masquerade everything sent to a cluster IP.",
            "iptables.masquerade_all"),
    Setting("iptables.localhostNodePorts", "iptables-localhost-nodeports", BOOL, True,
            "Serve node ports on 127.0.0.1 too (IPv4 only).",
            "iptables.localhost_node_ports"),
    Setting("iptables.syncPeriod", "iptables-sync-period", DURATION, 30.0,
            "How often the rules are looked after and failures retried, at the latest. Greater than 0.",
            "iptables.sync_period", Zero.DEFAULT_IN_FILE),
    Setting("iptables.minSyncPeriod", "iptables-min-sync-period", DURATION, 1.0,
            "The time between two writes of rules, at least; as a flag, 0 writes each change at once.",
            "iptables.min_sync_period", Zero.DEFAULT_IN_FILE),
    Setting("ipvs.syncPeriod", "", DURATION, 0.0, "How often ipvs mode looks after its rules."),
    Setting("ipvs.minSyncPeriod", "", DURATION, 0.0, "The time between two writes in ipvs mode."),
    Setting("ipvs.scheduler", "ipvs-scheduler", STRING, "", "The scheduler of ipvs mode."),
    Setting("ipvs.excludeCIDRs", "ipvs-exclude-cidrs", CIDRS, (), "What ipvs mode's clean-up leaves alone."),
    Setting("ipvs.strictARP", "ipvs-strict-arp", BOOL, False, "Strict ARP in ipvs mode."),
    Setting("ipvs.tcpTimeout", "ipvs-tcp-timeout", DURATION, 0.0, "The idle TCP timeout of ipvs mode."),
    Setting("ipvs.tcpFinTimeout", "ipvs-tcpfin-timeout", DURATION, 0.0, "The TCP FIN timeout of ipvs mode."),
    Setting("ipvs.udpTimeout", "ipvs-udp-timeout", DURATION, 0.0, "The UDP timeout of ipvs mode."),
    Setting("nftables.masqueradeBit", "", _INT32, 14, "The mark bit of nftables mode."),
    Setting("nftables.masqueradeAll", "", BOOL, False, "Masquerade everything in nftables mode."),
    Setting("nftables.syncPeriod", "", DURATION, 0.0, "How often nftables mode looks after its rules."),
    Setting("nftables.minSyncPeriod", "", DURATION, 0.0, "The time between two writes in nftables mode."),
    Setting("winkernel.networkName", "", STRING, "", "The HNS network, on Windows."),
    Setting("winkernel.sourceVip", "", STRING, "", "The source VIP, on Windows."),
    Setting("winkernel.enableDSR", "", BOOL, False, "Direct server return, on Windows."),
    Setting("winkernel.rootHnsEndpointName", "", STRING, "", "The root HNS endpoint, on Windows."),
    Setting("winkernel.forwardHealthCheckVip", "", BOOL, False, "Health checks by the VIP, on Windows."),
    Setting("detectLocalMode", "detect-local-mode", choice(DetectLocalMode), DetectLocalMode.CLUSTER_CIDR,
            "How traffic from this node's pods is told from other traffic.",
            "detect_local.mode", Zero.DEFAULT),
    Setting("detectLocal.bridgeInterface", "pod-bridge-interface", interface(15), "",
            "The pods' bridge, in mode BridgeInterface.",
            "detect_local.bridge_interface"),
    Setting("detectLocal.interfaceNamePrefix", "pod-interface-name-prefix", interface(14), "",
            "What the names of the pods' interfaces begin with, in mode InterfaceNamePrefix.",
            "detect_local.interface_name_prefix"),
    Setting("clusterCIDR", "cluster-cidr", CLUSTER_CIDRS, (),
            "The pods' addresses, in mode ClusterCIDR; for dual-stack one CIDR of each family.",
            "detect_local.cluster_cidrs"),
    Setting("nodePortAddresses", "nodeport-addresses", NODE_PORT_ADDRESSES, (),
            "Where node ports are served: CIDRs, or primary for the node's own addresses; empty: everywhere.",
            "node_port_addresses"),
    Setting("oomScoreAdj", "oom-score-adj", integer(-1000, 1000), -999,
            "How much the kernel spares this process when memory is short, -1000 (most) to 1000.",
            "oom_score_adj"),
    Setting("conntrack.maxPerCore", "conntrack-max-per-core", COUNT, 32768,
            "Connections to track for each core; 0 leaves the limit alone.",
            "conntrack.max_per_core"),
    Setting("conntrack.min", "conntrack-min", COUNT, 131072,
            "Connections to track at least, whatever the number of cores.",
            "conntrack.min"),
    Setting("conntrack.tcpEstablishedTimeout", "conntrack-tcp-timeout-established", DURATION, 86400.0,
            "How long an idle TCP connection is tracked; 0 leaves it alone.",
            "conntrack.tcp_established_timeout"),
    Setting("conntrack.tcpCloseWaitTimeout", "conntrack-tcp-timeout-close-wait", DURATION, 3600.0,
            "How long a half-closed TCP connection is tracked; 0 leaves it alone.",
            "conntrack.tcp_close_wait_timeout"),
    Setting("conntrack.tcpBeLiberal", "conntrack-tcp-be-liberal", BOOL, False,
            "Take TCP packets out of the window as valid.",
            "conntrack.tcp_be_liberal"),
    Setting("conntrack.udpTimeout", "conntrack-udp-timeout", DURATION, 0.0,
            "How long a UDP flow without a reply is tracked; 0 leaves it alone.",
            "conntrack.udp_timeout"),
    Setting("conntrack.udpStreamTimeout", "conntrack-udp-timeout-stream", DURATION, 0.0,
            "How long a UDP flow with replies is tracked; 0 leaves it alone.",
            "conntrack.udp_stream_timeout"),
    Setting("configSyncPeriod", "config-sync-period", DURATION, 900.0,
            "How often objects are gone over again. Greater than 0.",
            "config_sync_period", Zero.DEFAULT_IN_FILE),
    Setting("portRange", "", STRING, "", "The node ports of the former userspace mode."),
    Setting("windowsRunAsService", "", BOOL, False, "Run as a service, on Windows.", omitted=True),
    Setting("", "healthz-port", _PORT, HEALTH_PORT,
            "The port of a --healthz-bind-address that names none; 0 turns the server off.",
            instead="healthz-bind-address"),
    Setting("", "metrics-port", _PORT, METRICS_PORT,
            "The port of a --metrics-bind-address that names none; 0 turns the server off.",
            instead="metrics-bind-address"),
    Setting("", "ipvs-sync-period", DURATION, 30.0, "How often ipvs mode looks after its rules."),
    Setting("", "ipvs-min-sync-period", DURATION, 1.0, "The time between two writes in ipvs mode."),
    Setting("", "boot-id-file", STRING, "/proc/sys/kernel/random/boot_id", "Where the boot id is found."),
    Setting("", "machine-id-file", STRING, "/etc/machine-id,/var/lib/dbus/machine-id",
            "Where the machine id is found."),
)

OURS: tuple[Setting, ...] = (
    Setting("pykubeproxy.iptablesBackend", "iptables-backend", choice(Backend), Backend.AUTO,
            "Which iptables writes the rules; auto takes the one that the node already uses.",
            "iptables_backend", Zero.DEFAULT, beside_config=True, omitted=True),
    Setting("pykubeproxy.dispatch", "dispatch", choice(Dispatch), Dispatch.AUTO,
            "How packets find their service: flat, as with kube-proxy, tree, or auto: a tree where there are many.",
            "dispatch", Zero.DEFAULT, beside_config=True, omitted=True),
)

SETTINGS = KUBE_PROXY + OURS

# Flags that say what to do rather than how; no configuration file holds them.
ACTIONS: tuple[Setting, ...] = (
    Setting("", "config", STRING, "", "The configuration file, a KubeProxyConfiguration."),
    Setting("", "write-config-to", STRING, "", "Write the settings to this file and exit."),
    Setting("", "init-only", BOOL, False, "Do the set-up that takes all of root's rights, and exit."),
    Setting("", "cleanup", BOOL, False, "Take out all chains and jumps, and exit."),
    Setting("", "version", BOOL, False, "Print the version and exit."),
)
# fmt: on
