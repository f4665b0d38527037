"""The table of settings, Config and the documented defaults agree."""

import msgspec

from pykubeproxy.config import ACTIONS, SETTINGS, Config, load
from pykubeproxy.config.document import document
from pykubeproxy.config.table import OURS


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
    """No flag and no field stands twice in the table."""
    flags = [setting.flag for setting in SETTINGS + ACTIONS if setting.flag]
    paths = [setting.field for setting in SETTINGS if setting.field]
    assert len(flags) == len(set(flags))
    assert len(paths) == len(set(paths))


def test_without_file_and_flags_all_is_default() -> None:
    """The document of nothing is the table's defaults, without a warning."""
    config, warnings = load(None, {})
    assert warnings == ()
    assert config.document == document({setting: setting.default for setting in SETTINGS})


def test_the_defaults_are_those_of_kube_proxy() -> None:
    """The defaults that kube-proxy documents for what has an effect, word for word."""
    documented = {
        "kube-api-qps": "5",
        "kube-api-burst": "10",
        "bind-address": "0.0.0.0",
        "healthz-bind-address": "0.0.0.0:10256",
        "metrics-bind-address": "127.0.0.1:10249",
        "iptables-masquerade-bit": "14",
        "masquerade-all": "false",
        "iptables-localhost-nodeports": "true",
        "iptables-sync-period": "30s",
        "iptables-min-sync-period": "1s",
        "detect-local-mode": "ClusterCIDR",
        "oom-score-adj": "-999",
        "conntrack-max-per-core": "32768",
        "conntrack-min": "131072",
        "conntrack-tcp-timeout-established": "24h0m0s",
        "conntrack-tcp-timeout-close-wait": "1h0m0s",
        "conntrack-tcp-be-liberal": "false",
        "conntrack-udp-timeout": "0s",
        "conntrack-udp-timeout-stream": "0s",
        "config-sync-period": "15m0s",
        "v": "0",
        "logging-format": "text",
    }
    table = {setting.flag: setting.kind.text(setting.default) for setting in SETTINGS}
    assert {flag: table[flag] for flag in documented} == documented


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
    """Every setting says what it is for, in a sentence."""
    assert [setting for setting in SETTINGS + ACTIONS if not setting.help.endswith(".")] == []
