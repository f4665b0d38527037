"""An agent ignores what it can do without in a file for a newer release, warns, and starts."""

import pytest

from pykubeproxy.config import SETTINGS, ConfigError, load
from pykubeproxy.config.document import nested

HEADER = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
# A form of value that no setting has today.
NEWER = {"newer": [{"form": 1}]}
# Settings with an effect, whose default is harmless. A wrong value of any other one might misdirect packets, open or
# close addresses, or change limits of the node.
OPTIONAL = {"logging.format", "logging.verbosity", "pykubeproxy.dispatch"}
# Settings of other modes and systems, and of Go's logging.
WITHOUT_EFFECT = {
    "enableProfiling",
    "portRange",
    "windowsRunAsService",
    "logging.flushFrequency",
    "logging.vmodule",
    *(
        f"logging.options.{form}.{name}"
        for form in ("text", "json")
        for name in ("splitStream", "infoBufferSize")
    ),
}
OTHER_MODES = ("ipvs.", "nftables.", "winkernel.")
FIELDS = [setting.field for setting in SETTINGS if setting.field]


@pytest.mark.parametrize("field", FIELDS)
def test_only_values_that_the_agent_can_do_without_are_ignored(field: str) -> None:
    """The warning names the field, and the default counts; any other setting is an error that names the field."""
    content = nested({**HEADER, field: NEWER})
    if field in OPTIONAL | WITHOUT_EFFECT or field.startswith(OTHER_MODES):
        config, (warning,) = load(content, {})
        assert warning.startswith(f"The field {field} is ignored: ")
        assert config == load(HEADER, {}).config
    else:
        with pytest.raises(ConfigError) as caught:
            load(content, {})
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value", "warning"),
    [
        ("logging.format", "xml", '"xml" is not valid: must be text or json'),
        ("pykubeproxy.dispatch", "hash", '"hash" is not valid: must be auto or flat or tree'),
        ("ipvs.strictARP", "auto", '"auto" is not valid: must be true or false'),
        (
            "ipvs.tcpTimeout",
            5,
            '5 is not valid: must be a duration such as "30s", "1m30s" or "0s", with its unit',
        ),
    ],
)
def test_a_newer_value_of_an_optional_setting_is_a_warning(field: str, value: str, warning: str) -> None:
    config, warnings = load(nested({**HEADER, field: value}), {})
    assert warnings == (f"The field {field} is ignored: {warning}.",)
    assert config == load(HEADER, {}).config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "nftables"),
        ("detectLocalMode", "NodeInterface"),
        ("pykubeproxy.iptablesBackend", "bpf"),
        ("nodePortAddresses", ["secondary"]),
    ],
)
def test_a_newer_value_that_decides_where_packets_go_is_an_error(field: str, value: object) -> None:
    """A default in its place might send packets elsewhere or leave two backends with rules."""
    with pytest.raises(ConfigError, match=f"^{field}: .* is not valid: must "):
        load(nested({**HEADER, field: value}), {})


@pytest.mark.parametrize("field", ["newer", "pykubeproxy.newer", "iptables.newer", "newer.section.field"])
def test_a_newer_field_is_a_warning(field: str) -> None:
    config, (warning,) = load(nested({**HEADER, field: NEWER}), {})
    assert warning.startswith(f"The field {field.removesuffix('.section.field')} is unknown and ignored.")
    assert config == load(HEADER, {}).config


@pytest.mark.parametrize("flag", ["logging-format", "v", "dispatch"])
def test_a_newer_value_of_a_flag_is_an_error(flag: str) -> None:
    """Flags are part of the pod template, which a rollback reverts too."""
    with pytest.raises(ConfigError, match=f"^--{flag}: "):
        load(HEADER, {flag: "newer"})


def test_a_flag_wins_over_an_ignored_value() -> None:
    config, warnings = load(nested({**HEADER, "logging.format": "xml"}), {"logging-format": "json"})
    assert config.logging.format == "json"
    assert len(warnings) == 1
