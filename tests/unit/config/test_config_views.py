"""The table of settings, and the output of /configz, /flagz and --write-config-to."""

import json
from collections.abc import Mapping

import msgspec
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from pykubeproxy.config import ACTIONS, SETTINGS, Config, configz, dump, flag_values, flagz, load
from pykubeproxy.config.table import OURS

# The flags of the kube-proxy 1.36.2 whose answers are recorded below.
FLAGS = {
    "kubeconfig": "kc.yaml",
    "hostname-override": "node1",
    "cluster-cidr": "10.244.0.0/16",
    "proxy-mode": "iptables",
    "conntrack-max-per-core": "0",
    "conntrack-tcp-timeout-established": "0",
    "conntrack-tcp-timeout-close-wait": "0s",
    "v": "2",
}

CONFIGZ = (
    '{"kubeproxy.config.k8s.io":{"kind":"KubeProxyConfiguration","apiVersion":"kubeproxy.config.k8s.io/v1alpha1",'
    '"clientConnection":{"kubeconfig":"kc.yaml","acceptContentTypes":"",'
    '"contentType":"application/vnd.kubernetes.protobuf","qps":5,"burst":10},'
    '"logging":{"format":"text","flushFrequency":"5s","verbosity":2,'
    '"options":{"text":{"infoBufferSize":"0"},"json":{"infoBufferSize":"0"}}},'
    '"hostnameOverride":"node1","bindAddress":"0.0.0.0","healthzBindAddress":"0.0.0.0:10256",'
    '"metricsBindAddress":"127.0.0.1:10249","bindAddressHardFail":false,"enableProfiling":false,'
    '"showHiddenMetricsForVersion":"","mode":"iptables","iptables":{"masqueradeBit":14,"masqueradeAll":false,'
    '"localhostNodePorts":true,"syncPeriod":"30s","minSyncPeriod":"1s"},"ipvs":{"syncPeriod":"0s",'
    '"minSyncPeriod":"0s","scheduler":"","excludeCIDRs":null,"strictARP":false,"tcpTimeout":"0s",'
    '"tcpFinTimeout":"0s","udpTimeout":"0s"},"nftables":{"masqueradeBit":14,"masqueradeAll":false,'
    '"syncPeriod":"0s","minSyncPeriod":"0s"},"winkernel":{"networkName":"","sourceVip":"","enableDSR":false,'
    '"rootHnsEndpointName":"","forwardHealthCheckVip":false},"detectLocalMode":"ClusterCIDR",'
    '"detectLocal":{"bridgeInterface":"","interfaceNamePrefix":""},"clusterCIDR":"10.244.0.0/16",'
    '"nodePortAddresses":null,"oomScoreAdj":-999,"conntrack":{"maxPerCore":0,"min":131072,'
    '"tcpEstablishedTimeout":"0s","tcpCloseWaitTimeout":"0s","tcpBeLiberal":false,"udpTimeout":"0s",'
    '"udpStreamTimeout":"0s"},"configSyncPeriod":"15m0s","portRange":""}}'
)

# "~" stands for the blank that ends a line.
FLAGZ = """
kube-proxy flagz
Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees \
and is for debugging purposes only.
bind-address: 0.0.0.0
bind-address-hard-fail: false
boot-id-file: /proc/sys/kernel/random/boot_id
cleanup: false
cluster-cidr: 10.244.0.0/16
config:~
config-sync-period: 15m0s
conntrack-max-per-core: 0
conntrack-min: 131072
conntrack-tcp-be-liberal: false
conntrack-tcp-timeout-close-wait: 0s
conntrack-tcp-timeout-established: 0s
conntrack-udp-timeout: 0s
conntrack-udp-timeout-stream: 0s
detect-local-mode: ClusterCIDR
feature-gates:~
healthz-bind-address: 0.0.0.0:10256
healthz-port: 10256
help: false
hostname-override: node1
init-only: false
iptables-localhost-nodeports: true
iptables-masquerade-bit: 14
iptables-min-sync-period: 1s
iptables-sync-period: 30s
ipvs-exclude-cidrs: []
ipvs-min-sync-period: 1s
ipvs-scheduler:~
ipvs-strict-arp: false
ipvs-sync-period: 30s
ipvs-tcp-timeout: 0s
ipvs-tcpfin-timeout: 0s
ipvs-udp-timeout: 0s
kube-api-burst: 10
kube-api-content-type: application/vnd.kubernetes.protobuf
kube-api-qps: 5
kubeconfig: kc.yaml
log-flush-frequency: 5s
log-json-info-buffer-size: 0
log-json-split-stream: false
log-text-info-buffer-size: 0
log-text-split-stream: false
logging-format: text
machine-id-file: /etc/machine-id,/var/lib/dbus/machine-id
masquerade-all: false
master:~
metrics-bind-address: 127.0.0.1:10249
metrics-port: 10249
nodeport-addresses: []
oom-score-adj: -999
pod-bridge-interface:~
pod-interface-name-prefix:~
profiling: false
proxy-mode: iptables
show-hidden-metrics-for-version:~
v: 2
version: false
vmodule:~
write-config-to:~
""".replace("~", " ")


def test_configz_is_as_recorded() -> None:
    """For the recorded flags, /configz is byte for byte what kube-proxy answered."""
    assert json.dumps(configz(load(None, FLAGS).config), separators=(",", ":")) == CONFIGZ


def test_flagz_is_as_recorded() -> None:
    """For the recorded flags, /flagz is what kube-proxy answered and our own flags."""
    ours = ("dispatch: auto", "iptables-backend: auto", "max-affinity-lists: 500", "max-service-pairs: 50000")
    lines = flagz(flag_values(FLAGS, load(None, FLAGS).config)).split("\n")
    assert "\n".join(line for line in lines if line not in ours) == FLAGZ
    assert set(ours) <= set(lines)


def test_flagz_shows_what_was_ignored_as_it_was_given() -> None:
    """Beside a file a flag may be nonsense without harm, and the page is there all the same."""
    flags = {"iptables-sync-period": "30", "kube-api-qps": ["fast", "faster"], "v": "2"}
    head = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
    config = load(head, flags).config
    assert config.logging.verbosity == 2
    lines = flagz(flag_values(flags, config)).splitlines()
    assert {"iptables-sync-period: 30", "kube-api-qps: faster", "v: 2"} <= set(lines)


_NAMES = st.text(st.characters(categories=["L", "N"], max_codepoint=0x2FF), min_size=1, max_size=8)
_BOOLS = st.sampled_from(["true", "false"])
_SECONDS = st.integers(0, 10**9).map(lambda milliseconds: f"{milliseconds}ms")
_PORTS = st.integers(1, 65535)
_V4 = st.ip_addresses(v=4).map(str)
_V6 = st.ip_addresses(v=6).map(str)
_CIDRS = st.tuples(_V4, st.integers(0, 32)).map("{0[0]}/{0[1]}".format) | st.tuples(
    _V6, st.integers(0, 128)
).map("{0[0]}/{0[1]}".format)
_FILED = st.fixed_dictionaries(
    {},
    optional={
        "kubeconfig": st.text(max_size=9),
        "hostname-override": _NAMES,
        "bind-address": _V4 | _V6,
        "healthz-bind-address": _V4 | st.tuples(_V6, _PORTS).map("[{0[0]}]:{0[1]}".format),
        "metrics-bind-address": _V6 | st.tuples(_V4, _PORTS).map("{0[0]}:{0[1]}".format),
        "cluster-cidr": _CIDRS,
        "nodeport-addresses": st.lists(_CIDRS, max_size=3),
        "masquerade-all": _BOOLS,
        "iptables-localhost-nodeports": _BOOLS,
        "iptables-masquerade-bit": st.integers(0, 31),
        "oom-score-adj": st.integers(-1000, 1000),
        "conntrack-min": st.integers(0, 2**31 - 1),
        "conntrack-tcp-timeout-established": _SECONDS,
        "conntrack-udp-timeout": _SECONDS,
        "iptables-sync-period": st.integers(1, 10**6).map(lambda seconds: f"{seconds}s"),
        "feature-gates": st.dictionaries(_NAMES, _BOOLS).map(
            lambda gates: ",".join(map("=".join, gates.items()))
        ),
        "kube-api-qps": st.floats(0, 1000).map(lambda number: f"{number:.3f}"),
        "vmodule": st.dictionaries(_NAMES, st.integers(0, 9)).map(
            lambda levels: ",".join(f"{name}={level}" for name, level in levels.items())
        ),
        "ipvs-exclude-cidrs": st.lists(_CIDRS, max_size=2),
        "v": st.integers(0, 9),
        "logging-format": st.sampled_from(["text", "json"]),
        "detect-local-mode": st.sampled_from(["ClusterCIDR", "NodeCIDR"]),
        "iptables-backend": st.sampled_from(["auto", "nft", "legacy"]),
    },
)


@given(_FILED)
@example({"kube-api-qps": "1e20", "ipvs-tcp-timeout": "-2562047h47m16.854775808s"})
@example({"kube-api-qps": "-3e38", "conntrack-udp-timeout": "2562047h47m16.854775807s"})
@example({"detect-local-mode": "NodeCIDR", "cluster-cidr": " x,,", "pod-bridge-interface": "a b+"})
@example({"kubeconfig": "a\x85 b \ud83d\n"})
@example({"hostname-override": "n", "kubeconfig": "010"})
def test_a_dumped_config_loads_as_itself(flags: Mapping[str, object]) -> None:
    """A file of --write-config-to reads back as the same Config, without warnings.

    A file shows the defaults instead of a rate or a content type of 0 and "" by flag, which mean them too.
    """
    config = load(None, flags).config
    again, warnings = load(dump(config), {})
    assert msgspec.structs.replace(again, document=config.document) == config
    assert warnings == ()


def test_a_dump_is_a_plain_kube_proxy_configuration() -> None:
    """Unless ours are set, another kube-proxy can read the file: it has upstream's fields and no others."""
    assert yaml.safe_load(dump(load(None, FLAGS).config)) == json.loads(CONFIGZ)["kubeproxy.config.k8s.io"]


def _leaves(kind: type[msgspec.Struct], prefix: str = "") -> set[str]:
    found = set()
    for field in msgspec.structs.fields(kind):
        path = prefix + field.name
        nested = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        if nested and field.name != "feature_gates":
            found |= _leaves(field.type, path + ".")
        else:
            found.add(path)
    return found


def test_each_attribute_of_config_has_one_setting() -> None:
    """Config holds nothing that the table does not set, and the table sets nothing twice."""
    attributes = [setting.attribute for setting in SETTINGS if setting.attribute]
    assert sorted(attributes) == sorted(_leaves(Config) - {"document"})


def test_flags_and_fields_are_unique() -> None:
    flags = [setting.flag for setting in SETTINGS + ACTIONS if setting.flag]
    paths = [setting.field for setting in SETTINGS if setting.field]
    assert len(flags) == len(set(flags))
    assert len(paths) == len(set(paths))


def test_defaults_that_the_recorded_flags_hide() -> None:
    table = {setting.flag: setting.kind.text(setting.default) for setting in SETTINGS}
    assert [table[flag] for flag in FLAGS if flag.startswith(("conntrack", "v"))] == [
        "32768",
        "24h0m0s",
        "1h0m0s",
        "0",
    ]


def test_each_default_is_a_value_of_its_kind() -> None:
    """A default written to a file or, unless it is empty, as a flag reads back as itself."""
    for setting in SETTINGS:
        plain = setting.kind.plain(setting.default)
        assert plain is None or setting.kind.read(plain) == setting.default, setting.field
        text = setting.kind.text(setting.default)
        assert text in ("", "[]") or setting.kind.parse(text) == setting.default, setting.flag


def test_ours_stand_under_one_key_and_count_beside_a_file() -> None:
    """Settings beyond kube-proxy's live under pykubeproxy:, where their flags win."""
    assert all(setting.field.startswith("pykubeproxy.") and setting.beside_config for setting in OURS)


def test_the_flags_that_count_beside_a_file() -> None:
    """Of kube-proxy's flags, logging, the node's name and the API server's URL count beside a file."""
    kube_proxys = {setting.flag for setting in SETTINGS if setting.beside_config and setting not in OURS}
    logging = {"v", "vmodule", "logging-format", "log-flush-frequency"}
    buffers = {
        f"log-{form}-{what}" for form in ("text", "json") for what in ("split-stream", "info-buffer-size")
    }
    assert kube_proxys == logging | buffers | {"hostname-override", "master"}


def test_each_setting_has_a_help_text() -> None:
    assert [setting for setting in SETTINGS + ACTIONS if not setting.help.endswith(".")] == []
