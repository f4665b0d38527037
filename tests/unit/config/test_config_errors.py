"""Settings that are refused with an error, or ignored with a warning, each in one line."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pykubeproxy.config import SETTINGS, ConfigError, load
from pykubeproxy.config.document import nested
from tests.settings import HEAD, HEADER

# A body, and below it the error.
REFUSED = """\
iptables: {masqueradeBit: 32}
  iptables.masqueradeBit: 32 is not valid: must be a whole number from 0 to 31
iptables: {masqueradeBit: -1}
  iptables.masqueradeBit: -1 is not valid: must be a whole number from 0 to 31
iptables: {masqueradeBit: true}
  iptables.masqueradeBit: true is not valid: must be a whole number from 0 to 31
oomScoreAdj: 1001
  oomScoreAdj: 1001 is not valid: must be a whole number from -1000 to 1000
oomScoreAdj: -1001
  oomScoreAdj: -1001 is not valid: must be a whole number from -1000 to 1000
iptables: {syncPeriod: -1s}
  iptables.syncPeriod: "-1s" is not valid: must be 0 or more
iptables: {syncPeriod: 30}
  iptables.syncPeriod: 30 is not valid: must be a duration such as "30s", "1m30s" or "0s", with its unit
iptables: {minSyncPeriod: soon}
  iptables.minSyncPeriod: "soon" is not valid: must be a duration such as "30s", "1m30s" or "0s"
iptables: {minSyncPeriod: 40s}
  iptables.minSyncPeriod: 40s is not valid: must be at most the sync period, 30s
configSyncPeriod: -5m
  configSyncPeriod: "-5m" is not valid: must be 0 or more
bindAddress: localhost
  bindAddress: "localhost" is not valid: must be an IP address
bindAddress: "fe80::1%eth0"
  bindAddress: "fe80::1%eth0" is not valid: must be an IP address
healthzBindAddress: 0.0.0.0:70000
  healthzBindAddress: "0.0.0.0:70000" is not valid: must have a port from 1 to 65535
healthzBindAddress: 0.0.0.0:0
  healthzBindAddress: "0.0.0.0:0" is not valid: must have a port from 1 to 65535
detectLocalMode: InterfaceNamePrefix\\ndetectLocal: {interfaceNamePrefix: cali+}
  detectLocal.interfaceNamePrefix: "cali+" is not valid: must be an interface name of at most 14 characters, without a "+" at its end
metricsBindAddress: localhost:1
  metricsBindAddress: "localhost:1" is not valid: must be an IP address, or one with a port such as 0.0.0.0:10256 or [::]:10256
clusterCIDR: 10.0.0.0
  clusterCIDR: "10.0.0.0" is not valid: must be a CIDR such as 10.244.0.0/16 or fd00:10:244::/56
clusterCIDR: 10.0.0.0/8,11.0.0.0/8
  clusterCIDR: "10.0.0.0/8,11.0.0.0/8" is not valid: must hold at most one CIDR for each address family
nodePortAddresses: [10.0.0.0/33]
  nodePortAddresses: ["10.0.0.0/33"] is not valid: must be CIDRs such as 10.244.0.0/16, primary, localhost or all
nodePortAddresses: [primary, Localhost]
  nodePortAddresses: ["primary", "Localhost"] is not valid: must be CIDRs such as 10.244.0.0/16, primary, localhost or all
nodePortAddresses: primary
  nodePortAddresses: "primary" is not valid: must be a list
detectLocalMode: BridgeInterface
  detectLocal.bridgeInterface: "" is not valid: must name an interface in mode BridgeInterface
detectLocalMode: InterfaceNamePrefix
  detectLocal.interfaceNamePrefix: "" is not valid: must name an interface in mode InterfaceNamePrefix
detectLocalMode: BridgeInterface\\ndetectLocal: {bridgeInterface: a b}
  detectLocal.bridgeInterface: "a b" is not valid: must be an interface name of at most 15 characters, without a "+" at its end
detectLocalMode: InterfaceNamePrefix\\ndetectLocal: {interfaceNamePrefix: abcdefghijklmno}
  detectLocal.interfaceNamePrefix: "abcdefghijklmno" is not valid: must be an interface name of at most 14 characters, without a "+" at its end
detectLocalMode: Magic
  detectLocalMode: "Magic" is not valid: must be ClusterCIDR or NodeCIDR or BridgeInterface or InterfaceNamePrefix
mode: nftables
  mode: "nftables" is not valid: must be iptables or empty; pykubeproxy has no other mode
conntrack: {min: -1}
  conntrack.min: -1 is not valid: must be a whole number, 0 or more
conntrack: {udpTimeout: -1s}
  conntrack.udpTimeout: "-1s" is not valid: must be 0 or more
clientConnection: {burst: -1}
  clientConnection.burst: -1 is not valid: must be a whole number, 0 or more
clientConnection: {qps: .nan}
  clientConnection.qps: nan is not valid: must be a number up to 3.4e38; a negative one means no limit
showHiddenMetricsForVersion: "1.34"
  showHiddenMetricsForVersion: "1.34" is not valid: must be 1.35 or empty
featureGates: {A: 'true'}
  featureGates: a mapping is not valid: must map each gate's name to true or false
pykubeproxy: {iptablesBackend: x}
  pykubeproxy.iptablesBackend: "x" is not valid: must be auto or nft or legacy
iptables: 5
  iptables: 5 is not valid: must be a mapping of fields
hostnameOverride: 5
  hostnameOverride: 5 is not valid: must be a string (put quotes around it)
hostnameOverride: '  '
  hostnameOverride: "  " is not valid: must be a node's name or empty
"""


def pairs(table: str) -> list[tuple[str, str]]:
    """Return the pairs of lines in a table."""
    lines = [line.strip().replace("\\n", "\n") for line in table.splitlines()]
    return list(zip(lines[::2], lines[1::2], strict=True))


@pytest.mark.parametrize(("body", "message"), pairs(REFUSED))
def test_an_impossible_value_is_refused(body: str, message: str) -> None:
    """The one line names the field, the value and what is allowed; the field can be asked for, too."""
    with pytest.raises(ConfigError) as caught:
        load(HEAD + body, {})
    assert str(caught.value) == message
    assert caught.value.field == message.partition(":")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the configuration file must hold a KubeProxyConfiguration, not null"),
        ("[]", "the configuration file must hold a KubeProxyConfiguration, not []"),
        ("a: 1", "kind: is missing: must be KubeProxyConfiguration"),
        ("kind: Pod", 'kind: "Pod" is not valid: must be KubeProxyConfiguration'),
        (
            "kind: KubeProxyConfiguration\napiVersion: v1",
            'apiVersion: "v1" is not valid: must be kubeproxy.config.k8s.io/v1alpha1',
        ),
        (
            "a: ::",
            (
                "the configuration file is not valid YAML: mapping values are not allowed in this context, line 1;"
                " put quotes around a value that ends in a colon or holds one before a space"
            ),
        ),
        ("---\n---\n" + HEAD, "the configuration file must hold a KubeProxyConfiguration, not null"),
        (
            "{kind: KubeProxyConfiguration}",
            (
                'the configuration file starts with "{" but is not valid JSON:'
                " Expecting property name enclosed in double quotes, line 1"
            ),
        ),
        (
            '{"a": NaN}',
            'the configuration file starts with "{" but is not valid JSON: NaN is not a number',
        ),
        (
            '{"a":' * 100_000,
            'the configuration file starts with "{" but is not valid JSON: it is nested too deeply',
        ),
        (
            "%YAML 1.2\n---\n" + HEAD,
            "the configuration file is not valid YAML: found incompatible YAML document, line 1",
        ),
        (b"\xff\xfe\xfd", "the configuration file is not UTF-8 text; save it as UTF-8"),
        ("[" * 500 + "]" * 500, "the configuration file is not valid YAML: it is nested too deeply, line 1"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text: str | bytes, message: str) -> None:
    """Other kinds, other versions and invalid YAML are rejected in one line."""
    with pytest.raises(ConfigError) as caught:
        load(text, {})
    assert str(caught.value) == message


def _only_config_error(content: str | bytes | dict[str, object]) -> None:
    """Loads, and lets nothing pass but a ConfigError of one line."""
    try:
        _, warnings = load(content, {})
    except ConfigError as error:
        warnings = (str(error),)
    assert all(line and "\n" not in line for line in warnings)


@given(st.text() | st.binary())
@example("a: !!int x")
@example("a: !!timestamp x")
@example("a: !!bool x")
@example("a: !!int ''")
@example("&a [*a]")
@example(HEAD + "nodePortAddresses: &a [*a]")
@example(HEAD + "iptables: &a {iptables: *a}")
@example(HEAD + "oomScoreAdj: 0x" + "f" * 9000)
@example(HEAD + "? [a]\n: b")
@example('{"a": "\\ud83d"}')
def test_any_text_is_read_or_refused(content: str | bytes) -> None:
    _only_config_error(content)


_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=3)
)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner), max_leaves=4
)


@given(
    st.dictionaries(
        st.sampled_from([setting.field for setting in SETTINGS if setting.field]), _VALUES, max_size=4
    )
)
def test_any_value_of_any_field_is_read_or_refused(values: dict[str, object]) -> None:
    _only_config_error(nested({**HEADER, **values}))


# A body, and below it the warning.
UNKNOWN = """\
iptables: {syncPeriode: 5s}
  The field iptables.syncPeriode is unknown and ignored. Did you mean iptables.syncPeriod?
clusterCidr: 10.0.0.0/8
  The field clusterCidr is unknown and ignored. Did you mean clusterCIDR?
masqueradeAll: true
  The field masqueradeAll is unknown and ignored. Did you mean iptables.masqueradeAll?
pykubeproxy: {iptables-backend: nft}
  The field pykubeproxy.iptables-backend is unknown and ignored. Did you mean pykubeproxy.iptablesBackend?
zebra: {stripes: 5}
  The field zebra is unknown and ignored.
"a\\tb": 5
  The field 'a\\tb' is unknown and ignored.
1: 5
  The field 1 is unknown and ignored.
iptables.masqueradeBit: 5
  The field "iptables.masqueradeBit" is unknown and ignored. Did you mean iptables.masqueradeBit?
"""


@pytest.mark.parametrize(("body", "warning"), pairs(UNKNOWN))
def test_an_unknown_field_is_named(body: str, warning: str) -> None:
    """The path of an unknown field is in the warning, with the field that was probably meant."""
    config, warnings = load(HEAD + body, {})
    assert warnings == (warning,)
    assert config == load(HEAD, {}).config


DUPLICATES = "oomScoreAdj: 1\niptables: {masqueradeBit: 1, masqueradeBit: 2}\noomScoreAdj: 3\nx: {y: 1, y: 2}"
JSON_DUPLICATES = """,
"oomScoreAdj": 1, "iptables": {"masqueradeBit": 1, "masqueradeBit": 2}, "oomScoreAdj": 3, "x": {"y": 1, "y": 2}}"""


@pytest.mark.parametrize("text", [HEAD + DUPLICATES, json.dumps(HEADER)[:-1] + JSON_DUPLICATES])
def test_duplicate_field_is_a_warning_and_the_last_counts(text: str) -> None:
    """In a section too, unless it is unknown."""
    config, warnings = load(text, {})
    assert sorted(warnings) == [
        "The field iptables.masqueradeBit is set more than once; the last value counts.",
        "The field oomScoreAdj is set more than once; the last value counts.",
        "The field x is unknown and ignored.",
    ]
    assert (config.oom_score_adj, config.iptables.masquerade_bit) == (3, 2)


@pytest.mark.parametrize("rest", ["---\n\nkind: Other", "...\n# next\na: [", "---\n---\nb: ["])
def test_a_further_document_is_a_warning(rest: str) -> None:
    """Only the first document counts, also before invalid ones."""
    config, warnings = load(f"oomScoreAdj: 3  # \u00e4\u6f22\n{HEAD}{rest}", {})
    assert warnings == ("The document in line 6 is ignored; only the first one counts.",)
    assert config.oom_score_adj == 3


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


@pytest.mark.parametrize("flag", ["logging-format", "v", "dispatch"])
def test_a_newer_value_of_a_flag_is_an_error(flag: str) -> None:
    """Flags are part of the pod template, which a rollback reverts too."""
    with pytest.raises(ConfigError, match=f"^--{flag}: "):
        load(HEADER, {flag: "newer"})


def test_a_flag_wins_over_an_ignored_value() -> None:
    config, warnings = load(nested({**HEADER, "logging.format": "xml"}), {"logging-format": "json"})
    assert config.logging.format == "json"
    assert len(warnings) == 1
