"""Reading a KubeProxyConfiguration and flags."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.config import (
    ACTIONS,
    SETTINGS,
    ConfigError,
    DetectLocalMode,
    ListenAddress,
    LogFormat,
    load,
)
from pykubeproxy.config.document import nested
from pykubeproxy.config.model import IptablesBackend
from tests.settings import HEAD, HEADER, by_flags, read

# As `kubeadm init` leaves it in the ConfigMap kube-proxy: every field, most of them empty.
KUBEADM = (
    HEAD
    + """\
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
    text:
      infoBufferSize: "0"
  verbosity: 0
metricsBindAddress: ""
mode: ""
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  enableDSR: false
  forwardHealthCheckVip: false
  networkName: ""
  rootHnsEndpointName: ""
  sourceVip: ""
"""
)


def test_the_file_of_kubeadm_is_taken_unchanged() -> None:
    """All that kubeadm leaves empty, zero or null stands for the default; nothing is warned of."""
    expected = load(
        None, {"kubeconfig": "/var/lib/kube-proxy/kubeconfig.conf", "cluster-cidr": "10.244.0.0/16"}
    )
    assert load(KUBEADM, {}) == expected


def test_text_bytes_json_and_mapping_are_the_same() -> None:
    """The file may come as text, as bytes with or without a mark, as UTF-16, as JSON, or parsed already."""
    parsed = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "oomScoreAdj": 7,
    }
    expected = read("oomScoreAdj: 7")
    forms = (
        HEAD + "oomScoreAdj: 7",
        (HEAD + "oomScoreAdj: 7").encode("utf-8-sig"),
        ("\ufeff" + HEAD + "oomScoreAdj: 7").encode("utf-16-le"),
        ("\ufeff" + HEAD + "oomScoreAdj: 7").encode("utf-16-be"),
        "\n " + json.dumps(parsed, indent="\t"),
        "---\n" + json.dumps(parsed),
        parsed,
    )
    assert [load(form, {}) for form in forms] == [(expected, ())] * len(forms)


def test_fields_reach_their_attributes() -> None:
    """Values are typed: seconds as floats, words as enumerations, lists as tuples."""
    config = read("""
clientConnection: {kubeconfig: kc, qps: 7.5, burst: 3, contentType: application/json, acceptContentTypes: x}
logging: {format: json, verbosity: 4}
hostnameOverride: " Node1 "
bindAddress: 10.0.0.1
healthzBindAddress: 10.0.0.1:1
metricsBindAddress: "::1"
bindAddressHardFail: true
iptables: {masqueradeBit: 31, masqueradeAll: true, localhostNodePorts: false, syncPeriod: 1m30s,
  minSyncPeriod: 10s}
detectLocalMode: BridgeInterface
detectLocal: {bridgeInterface: cbr0, interfaceNamePrefix: veth}
clusterCIDR: 10.244.3.0/16,FD00:10:244:0::/56  # unused in this mode
nodePortAddresses: [192.168.99.7/24, "fd00:99::/64"]
oomScoreAdj: 0
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: "0", tcpBeLiberal: true,
  udpTimeout: 10s, udpStreamTimeout: 20s}
configSyncPeriod: 1h
featureGates: {B: true, AllowServiceExternalIPs: false}
pykubeproxy: {iptablesBackend: legacy}
""")
    client, iptables, local, conntrack = config.client, config.iptables, config.detect_local, config.conntrack
    assert (client.kubeconfig, client.qps, client.burst) == ("kc", 7.5, 3)
    assert (client.content_type, client.accept_content_types) == ("application/json", "x")
    assert (config.logging.format, config.logging.verbosity) == (LogFormat.JSON, 4)
    assert config.hostname_override == "node1"
    assert config.bind_address == "10.0.0.1"
    assert (config.health_address, config.metrics_address) == (
        ListenAddress("10.0.0.1", 1),
        ListenAddress("::1", 10249),
    )
    assert (config.bind_address_hard_fail, config.oom_score_adj) == (True, 0)
    assert (iptables.masquerade_bit, iptables.masquerade_all, iptables.localhost_node_ports) == (
        31,
        True,
        False,
    )
    assert (iptables.sync_period, iptables.min_sync_period, config.config_sync_period) == (90.0, 10.0, 3600.0)
    assert (local.mode, local.bridge_interface) == (DetectLocalMode.BRIDGE_INTERFACE, "cbr0")
    assert local.interface_name_prefix == "veth"
    assert local.cluster_cidrs == ("10.244.3.0/16", "FD00:10:244:0::/56")
    assert config.node_port_addresses == ("192.168.99.0/24", "fd00:99::/64")
    assert (conntrack.max_per_core, conntrack.min, conntrack.tcp_be_liberal) == (0, 0, True)
    assert (conntrack.tcp_established_timeout, conntrack.tcp_close_wait_timeout) == (0.0, 0.0)
    assert (conntrack.udp_timeout, conntrack.udp_stream_timeout) == (10.0, 20.0)
    assert config.feature_gates.gates == (("AllowServiceExternalIPs", False), ("B", True))
    assert not config.feature_gates.allow_service_external_ips
    assert config.iptables_backend is IptablesBackend.LEGACY


def test_an_ipv6_bind_address_moves_the_servers() -> None:
    """With an IPv6 bindAddress the servers listen on IPv6, unless they are told where."""
    config = read('bindAddress: "fd00::1"\nmetricsBindAddress: 127.0.0.1:9')
    assert config.health_address == ListenAddress("::", 10256)
    assert config.metrics_address == ListenAddress("127.0.0.1", 9)
    assert read('bindAddress: "::"').metrics_address == ListenAddress("::1", 10249)


@pytest.mark.parametrize("end", ["---", "---\n", "---\n# the end\n", "---\n---\n", "..."])
def test_an_empty_document_may_follow(end: str) -> None:
    """Templates may leave empty documents and comments at the end, as for kube-proxy."""
    loaded = load(f"---\n{HEAD}clusterCIDR: 10.0.0.0/8\n{end}", {})
    assert loaded.config.detect_local.cluster_cidrs == ("10.0.0.0/8",)
    assert not loaded.warnings


@pytest.mark.parametrize("text", ["1", "t", "T", "true", "TRUE", "True", True])
def test_what_go_takes_for_true(text: object) -> None:
    assert by_flags(masquerade_all=text).iptables.masquerade_all is True


@pytest.mark.parametrize("text", ["0", "f", "F", "false", "FALSE", "False", False])
def test_what_go_takes_for_false(text: object) -> None:
    assert by_flags(iptables_localhost_nodeports=text).iptables.localhost_node_ports is False


def test_lists_may_be_joined_and_repeated() -> None:
    """A list is comma-separated, and a flag given again adds to it; an empty one is empty."""
    assert by_flags(nodeport_addresses=("10.0.0.0/8,11.0.0.0/8", "fd00::/64")).node_port_addresses == (
        "10.0.0.0/8",
        "11.0.0.0/8",
        "fd00::/64",
    )
    assert by_flags(nodeport_addresses="primary").node_port_addresses == ("primary",)
    assert by_flags(nodeport_addresses="").node_port_addresses == ()


def test_feature_gates_are_a_list_of_pairs() -> None:
    """Gates are NAME=BOOL; those unknown here are kept."""
    gates = by_flags(feature_gates=("B=true,A=0", "AllowServiceExternalIPs=false")).feature_gates
    assert gates.gates == (("A", False), ("AllowServiceExternalIPs", False), ("B", True))
    assert not gates.allow_service_external_ips
    assert by_flags().feature_gates.allow_service_external_ips


def test_zero_by_flag_is_zero_where_that_means_something() -> None:
    """A minSyncPeriod of 0 can be had by flag; elsewhere 0 or empty is the default."""
    assert by_flags(iptables_min_sync_period="0").iptables.min_sync_period == 0.0
    assert by_flags(hostname_override="", proxy_mode="") == by_flags()
    assert by_flags(kube_api_qps="0", kube_api_burst="0").client == by_flags().client


def test_flags_without_an_address_leave_the_servers_at_their_defaults() -> None:
    """Neither an empty address nor an IPv6 --bind-address moves them; only --healthz-port 0 turns one off."""
    assert by_flags(healthz_bind_address="", metrics_bind_address="") == by_flags()
    for address in ("fd00::1", "::"):
        config = by_flags(bind_address=address)
        assert config.bind_address == address
        assert config.health_address == ListenAddress("0.0.0.0", 10256)
        assert config.metrics_address == ListenAddress("127.0.0.1", 10249)


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_a_deprecated_port_is_checked_where_it_counts(port: str) -> None:
    """An address that has a port of its own keeps it."""
    config, _ = load(None, {"healthz-port": port, "healthz-bind-address": "10.0.0.1:7"})
    assert config.health_address == ListenAddress("10.0.0.1", 7)
    with pytest.raises(ConfigError, match=rf"^--healthz-port: {port} is not valid: must be a port from 1 to"):
        load(None, {"healthz-port": port, "healthz-bind-address": "10.0.0.1"})


def test_an_error_names_the_flag() -> None:
    with pytest.raises(
        ConfigError, match=r'^--iptables-masquerade-bit: "40" is not valid: must be a whole number'
    ):
        by_flags(iptables_masquerade_bit="40")
    with pytest.raises(ConfigError, match=r"^--no-such: unknown flag$"):
        by_flags(no_such="1")


def test_an_address_may_leave_its_port_to_the_default() -> None:
    """An IP alone gets the server's own port."""
    assert by_flags(healthz_bind_address="::1", metrics_bind_address="10.0.0.1") == by_flags(
        healthz_bind_address="[::1]:10256", metrics_bind_address="10.0.0.1:10249"
    )


def test_the_deprecated_ports() -> None:
    """--healthz-port and --metrics-port: 0 turns a server off, another completes an address; each gives a warning."""
    config, warnings = load(
        None, {"healthz-port": "0", "metrics-port": "7", "metrics-bind-address": "10.0.0.1"}
    )
    assert (config.health_address, config.metrics_address) == (None, ListenAddress("10.0.0.1", 7))
    assert warnings == (
        "The flag --healthz-port is deprecated; use --healthz-bind-address instead.",
        "The flag --metrics-port is deprecated; use --metrics-bind-address instead.",
    )
    assert load(None, {"healthz-port": "7"}).config == by_flags()


def test_the_deprecated_ports_are_read_as_all_numbers_are() -> None:
    """In any form that Go takes; of one that stands twice the last counts."""
    flags = {"healthz-port": "0x7", "healthz-bind-address": ["::1", "10.0.0.1"], "metrics-port": ["7", "+0"]}
    config = load(None, flags).config
    assert (config.health_address, config.metrics_address) == (ListenAddress("10.0.0.1", 7), None)


def test_beside_a_file_most_flags_do_not_count() -> None:
    """kube-proxy's own flags give way to the file, defaults included; a warning says where to set them."""
    flags = {"cluster-cidr": "10.0.0.0/8", "ipvs-sync-period": "5s", "healthz-port": "0"}
    config, warnings = load(HEAD + "oomScoreAdj: 5", flags)
    assert config == load(HEAD + "oomScoreAdj: 5", {}).config
    assert warnings == (
        "The flag --cluster-cidr is ignored beside a configuration file; set clusterCIDR in the file instead.",
        "The flag --healthz-port is ignored beside a configuration file.",
        "The flag --ipvs-sync-period is ignored beside a configuration file.",
    )


def test_beside_a_file_some_flags_win() -> None:
    """Logging, the node's name, the API server's URL and what is ours count beside a file, and win."""
    body = (
        "hostnameOverride: a\nlogging: {format: text, verbosity: 1}\npykubeproxy: {iptablesBackend: legacy}"
    )
    flags = {
        "hostname-override": "B",
        "master": "https://x",
        "v": "4",
        "logging-format": "json",
        "iptables-backend": "nft",
    }
    config, warnings = load(HEAD + body, flags)
    assert warnings == ()
    assert (config.hostname_override, config.client.master) == ("b", "https://x")
    assert (config.logging.format, config.logging.verbosity) == (LogFormat.JSON, 4)
    assert config.iptables_backend is IptablesBackend.NFT


def test_flags_that_say_what_to_do_may_be_among_them() -> None:
    """The flags of run that are no settings are passed over."""
    assert load(None, {setting.flag: "x" for setting in ACTIONS}) == load(None, {})


@given(
    st.dictionaries(
        st.sampled_from([setting.flag for setting in SETTINGS if setting.flag]), st.text(max_size=9)
    )
)
def test_any_text_of_any_flag_is_read_or_refused(flags: dict[str, str]) -> None:
    try:
        load(None, flags)
    except ConfigError as error:
        assert "\n" not in str(error)


# A value other than the default, as a flag's text and as it stands in the file.
VALUES: dict[str, tuple[str, object]] = {
    "bind-address": ("10.0.0.1", "10.0.0.1"),
    "bind-address-hard-fail": ("true", True),
    "cluster-cidr": ("10.0.0.0/8,fd00::/48", "10.0.0.0/8,fd00::/48"),
    "config-sync-period": ("1m", "1m0s"),
    "conntrack-max-per-core": ("7", 7),
    "conntrack-min": ("7", 7),
    "conntrack-tcp-be-liberal": ("true", True),
    "conntrack-tcp-timeout-close-wait": ("7s", "7s"),
    "conntrack-tcp-timeout-established": ("7s", "7s"),
    "conntrack-udp-timeout": ("7s", "7s"),
    "conntrack-udp-timeout-stream": ("7s", "7s"),
    "detect-local-mode": ("NodeCIDR", "NodeCIDR"),
    "feature-gates": ("A=true,B=false", {"A": True, "B": False}),
    "healthz-bind-address": ("10.0.0.1:7", "10.0.0.1:7"),
    "hostname-override": ("node1", "node1"),
    "dispatch": ("tree", "tree"),
    "max-affinity-lists": ("9000", 9000),
    "max-service-pairs": ("9000", 9000),
    "iptables-backend": ("legacy", "legacy"),
    "iptables-localhost-nodeports": ("false", False),
    "iptables-masquerade-bit": ("7", 7),
    "iptables-min-sync-period": ("7s", "7s"),
    "iptables-sync-period": ("7m", "7m0s"),
    "ipvs-exclude-cidrs": ("10.0.0.0/8,11.0.0.0/8", ["10.0.0.0/8", "11.0.0.0/8"]),
    "ipvs-scheduler": ("rr", "rr"),
    "ipvs-strict-arp": ("true", True),
    "ipvs-tcp-timeout": ("7s", "7s"),
    "ipvs-tcpfin-timeout": ("7s", "7s"),
    "ipvs-udp-timeout": ("7s", "7s"),
    "kube-api-burst": ("7", 7),
    "kube-api-content-type": ("application/json", "application/json"),
    "kube-api-qps": ("7.5", 7.5),
    "kubeconfig": ("kc.yaml", "kc.yaml"),
    "log-flush-frequency": ("7s", "7s"),
    "log-json-info-buffer-size": ("7", "7"),
    "log-json-split-stream": ("true", True),
    "log-text-info-buffer-size": ("7", "7"),
    "log-text-split-stream": ("true", True),
    "logging-format": ("json", "json"),
    "masquerade-all": ("true", True),
    "metrics-bind-address": ("10.0.0.1:7", "10.0.0.1:7"),
    "nodeport-addresses": ("10.0.0.0/8,fd00::/48", ["10.0.0.0/8", "fd00::/48"]),
    "oom-score-adj": ("7", 7),
    "pod-bridge-interface": ("cbr0", "cbr0"),
    "pod-interface-name-prefix": ("veth", "veth"),
    "profiling": ("true", True),
    "show-hidden-metrics-for-version": ("1.35", "1.35"),
    "v": ("7", 7),
    "vmodule": ("x=7", [{"filePattern": "x", "verbosity": 7}]),
}
BOTH = {setting.flag: setting for setting in SETTINGS if setting.flag and setting.field}


# The only values of proxy-mode are the default and the empty text, which stands for it.
@pytest.mark.parametrize("flag", sorted(BOTH.keys() - {"proxy-mode"}))
def test_flag_and_field_mean_the_same(flag: str) -> None:
    """Either gives the same configuration, which is not the default one."""
    text, value = VALUES[flag]
    by_flag, by_file = load(None, {flag: text}), load(nested({**HEADER, BOTH[flag].field: value}), {})
    assert by_flag == by_file
    assert by_flag != load(None, {})
