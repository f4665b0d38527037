"""Flags and fields with the same meaning."""

import pytest

from pykubeproxy.config import SETTINGS, load

HEAD = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
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
# Its only values are the default and the empty text, which stands for it.
ALWAYS_THE_SAME = {"proxy-mode"}
BOTH = {setting.flag: setting for setting in SETTINGS if setting.flag and setting.field}


def test_none_is_left_out() -> None:
    """Every setting that has both a flag and a field is among those below."""
    assert VALUES.keys() == BOTH.keys() - ALWAYS_THE_SAME


@pytest.mark.parametrize("flag", sorted(VALUES))
def test_flag_and_field_mean_the_same(flag: str) -> None:
    """Either gives the same configuration, which is not the default one."""
    text, value = VALUES[flag]
    setting = BOTH[flag]
    content: dict[str, object] = {setting.field.rpartition(".")[2]: value}
    for section in reversed(setting.field.split(".")[:-1]):
        content = {section: content}
    by_flag, by_file = load(None, {flag: text}), load({**HEAD, **content}, {})
    assert by_flag == by_file
    assert by_flag != load(None, {})
