"""Reading a KubeProxyConfiguration."""

import json

import msgspec
import pytest

from pykubeproxy.config import Address, Config, DetectLocalMode, LogFormat, load
from pykubeproxy.config.model import IptablesBackend

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

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


def read(body: str) -> Config:
    """The Config of a file with this body, which must give no warning."""
    config, warnings = load(HEAD + body, {})
    assert warnings == ()
    return config


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
    assert (config.health_address, config.metrics_address) == (Address("10.0.0.1", 1), Address("::1", 10249))
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
    assert config.health_address == Address("::", 10256)
    assert config.metrics_address == Address("127.0.0.1", 9)
    assert read('bindAddress: "::"').metrics_address == Address("::1", 10249)


def test_settings_without_effect_are_kept() -> None:
    """Fields of other modes cause no warning, and change nothing but the document."""
    body = "ipvs: {scheduler: rr, excludeCIDRs: [10.0.0.1/8]}\nportRange: 1-2\nwindowsRunAsService: true\n"
    body += "logging: {flushFrequency: 7000000000}\nenableProfiling: true"
    config, default = read(body), read("").document
    assert msgspec.structs.replace(config, document=default) == read("")
    changed = {key: value for key, value in config.document.items() if value != default.get(key)}
    assert changed.keys() == {"enableProfiling", "ipvs", "logging", "windowsRunAsService"}


def test_values_that_look_like_dates_are_text() -> None:
    """A name such as 2024-01-01 is a name."""
    assert read("hostnameOverride: 2024-01-01").hostname_override == "2024-01-01"


@pytest.mark.parametrize("end", ["---", "---\n", "---\n# the end\n", "---\n---\n", "..."])
def test_an_empty_document_may_follow(end: str) -> None:
    """What templates leave behind at the end is nothing, as for kube-proxy."""
    loaded = load(f"---\n{HEAD}clusterCIDR: 10.0.0.0/8\n{end}", {})
    assert loaded.config.detect_local.cluster_cidrs == ("10.0.0.0/8",)
    assert not loaded.warnings
