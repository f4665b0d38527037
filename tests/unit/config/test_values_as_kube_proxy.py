"""A value that kube-proxy 1.36 takes is taken and shown as there, and one that it refuses is refused in one line.

The values were tried with a kube-proxy.
"""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.config import ConfigError, flag_values, load
from pykubeproxy.config.document import nested
from pykubeproxy.config.kinds import duration_text, parse_duration
from tests.settings import HEAD, read

JSON = '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", '

TAKEN_FIELDS = """\
clientConnection: {qps: -1}
clientConnection: {qps: -1, burst: 0}
clientConnection: {qps: 1e-60}
clientConnection: {burst: 2.0}
clientConnection: {contentType: x, acceptContentTypes: x}
conntrack: {maxPerCore: 32768.0}
conntrack: {maxPerCore: 3.2768e4}
conntrack: {maxPerCore: 32_768}
conntrack: {maxPerCore: !!float 7}
conntrack: {maxPerCore: null, min: null}
conntrack: {tcpEstablishedTimeout: null, tcpCloseWaitTimeout: null}
conntrack: {udpTimeout: -0s}
oomScoreAdj: -0.0
oomScoreAdj: 5.
iptables: {masqueradeBit: 14.0, localhostNodePorts: null}
iptables: {syncPeriod: "0", minSyncPeriod: 0s}
configSyncPeriod: 0s
clusterCIDR: 010.0.0.0/08
clusterCIDR: 10.0.0.0/0000016
clusterCIDR: "00fd00::/8"
clusterCIDR: "::ffff:10.0.0.0/104,fd00::/8"
detectLocalMode: NodeCIDR\\nclusterCIDR: 10.0.0.0/8,11.0.0.0/8
detectLocalMode: NodeCIDR\\nclusterCIDR: " nonsense,,"
detectLocalMode: BridgeInterface\\nclusterCIDR: x\\ndetectLocal: {bridgeInterface: cbr0, interfaceNamePrefix: cali+}
detectLocal: {bridgeInterface: "a very long name +", interfaceNamePrefix: cali+}
nodePortAddresses: [010.0.0.0/08, 10.0.0.0/8, "::ffff:11.0.0.0/104"]
bindAddress: 010.0.0.1
bindAddress: "00000::1"
bindAddress: "::ffff:10.0.0.1"
healthzBindAddress: 010.0.0.1:000080
healthzBindAddress: 10.0.0.1:+80
healthzBindAddress: "[10.0.0.1]:80"
showHiddenMetricsForVersion: "1.35"
showHiddenMetricsForVersion: null
ipvs: {scheduler: x, excludeCIDRs: [x, "", null], syncPeriod: -1s, minSyncPeriod: 40m}
ipvs: {tcpTimeout: -1s, tcpFinTimeout: -1s, udpTimeout: -2562047h47m16.854775808s}
nftables: {masqueradeBit: 99, syncPeriod: -1s, minSyncPeriod: -1s}
winkernel: {sourceVip: x, networkName: ""}
portRange: x
logging: {verbosity: 3.0, flushFrequency: 7e9}
logging: {vmodule: [{filePattern: a}, {filePattern: b, verbosity: 2147483647}], options: {text: null}}
"""

REFUSED_FIELDS = """\
clientConnection: {qps: 1e39}
clientConnection: {qps: .inf}
clientConnection: {qps: ""}
clientConnection: {burst: ""}
conntrack: {maxPerCore: 32768.5}
conntrack: {maxPerCore: 1e21}
conntrack: {maxPerCore: "7"}
conntrack: {maxPerCore: 2147483648}
conntrack: {tcpEstablishedTimeout: 0}
conntrack: {tcpEstablishedTimeout: ""}
conntrack: {udpTimeout: null}
iptables: {syncPeriod: 0}
iptables: {syncPeriod: 0.0}
iptables: {syncPeriod: null}
iptables: {syncPeriod: ""}
iptables: {syncPeriod: 500ms}
iptables: {minSyncPeriod: 0}
configSyncPeriod: 0
configSyncPeriod: ""
configSyncPeriod: -1s
clusterCIDR: " 10.0.0.0/8"
clusterCIDR: "10.0.0.0/8, fd00::/8"
clusterCIDR: 10.0.0.0/8,
clusterCIDR: 10.0.0.0/+8
clusterCIDR: 10.0.0.0/8,fd00::/8,fd01::/8
clusterCIDR: 10.0.0.0/8,::ffff:11.0.0.0/104
detectLocalMode: BridgeInterface\\ndetectLocal: {interfaceNamePrefix: cbr0}
nodePortAddresses: [" 10.0.0.0/8"]
nodePortAddresses: [null]
nodePortAddresses: [10.0.0.0/8, Primary]
nodePortAddresses: ["", primary]
bindAddress: " 10.0.0.1"
bindAddress: 0x0a.0.0.1
healthzBindAddress: 10.0.0.1:0
healthzBindAddress: "10.0.0.1:"
healthzBindAddress: "[::1]"
featureGates: {A: 1}
showHiddenMetricsForVersion: "1.36"
showHiddenMetricsForVersion: " "
showHiddenMetricsForVersion: 1.35
"""

TAKEN_FLAGS = """\
--kube-api-qps=-1
--kube-api-qps=inf
--kube-api-qps=nan
--kube-api-qps=1_0.5
--kube-api-qps=0 --kube-api-burst=0
--kube-api-qps=-1 --kube-api-burst=0
--kube-api-burst=0o17
--kube-api-burst=0b11
--kube-api-burst=0x_f
--kube-api-burst=1_000
--v=007
--cluster-cidr=x --detect-local-mode=NodeCIDR
--cluster-cidr= --detect-local-mode=NodeCIDR
--nodeport-addresses="10.0.0.0/8",fd00::/8
--nodeport-addresses= --nodeport-addresses=10.0.0.0/8
--bind-address=
--bind-address=010.0.0.1
--healthz-bind-address=1.2.3.4:000000080
--healthz-port=70000
--healthz-port=-1
--ipvs-sync-period=-5s --ipvs-min-sync-period=-1s
--ipvs-tcp-timeout=-1s --ipvs-exclude-cidrs=x,"a,b" --ipvs-scheduler=x
--pod-bridge-interface=averyveryverylongname --pod-interface-name-prefix=cali+
--vmodule=a=2147483647, --vmodule=,b=1
--feature-gates=ComponentFlagz=true,,AllAlpha=F
--show-hidden-metrics-for-version=1.35
--detect-local-mode= --proxy-mode= --kube-api-content-type= --hostname-override=
"""

REFUSED_FLAGS = """\
--kube-api-qps=
--kube-api-qps=1e39
--kube-api-burst=
--kube-api-burst=0
--kube-api-burst=08
--kube-api-burst=1__0
--kube-api-burst=2.0
--v=0x2
--v=+2
--v=
--config-sync-period=0
--config-sync-period=0s
--iptables-sync-period=0s
--iptables-sync-period=
--log-flush-frequency=0
--log-flush-frequency=
--cluster-cidr=
--cluster-cidr=10.0.0.0/8,
--nodeport-addresses=10.0.0.0/8,
--nodeport-addresses=,
--healthz-bind-address=1.2.3.4:0
--healthz-bind-address=1.2.3.4 --healthz-port=70000
--healthz-bind-address=1.2.3.4 --healthz-port=-1
--logging-format=
--vmodule=a=2147483648
--vmodule=a=b=1
--feature-gates=A
--show-hidden-metrics-for-version=1.34
--hostname-override=\u2003
"""

# kube-proxy 1.36 refuses these; docs/differences.md says why they are taken here.
ONLY_HERE_FIELDS = """\
featureGates: {A: null}
featureGates: {ServiceTrafficDistribution: false}
logging: {options: {text: {infoBufferSize: 64Ki}}}
logging: {options: {json: {infoBufferSize: 5}}}
logging: {format: json, vmodule: [{filePattern: a}]}
nodePortAddresses: [10.0.0.0/8, primary]
nodePortAddresses: [primary, localhost]
nodePortAddresses: [all]
"""

ONLY_HERE_FLAGS = """\
--feature-gates=A=true,,B=F
--log-text-info-buffer-size=64Ki
--log-json-split-stream=true
--nodeport-addresses=primary,localhost
--nodeport-addresses=all
"""

# The changed values in /configz, by path, and in /flagz. A flag "config" stands for a file.
SHOWN: tuple[tuple[str, str, dict[str, object], dict[str, str]], ...] = (
    (
        "",
        (
            "--bind-address=010.0.0.1 --healthz-bind-address=::ffff:1.2.3.4 --kube-api-qps=0 --proxy-mode="
            " --cluster-cidr=10.0.0.5/8 --nodeport-addresses=10.0.0.5/8,::ffff:11.0.0.0/104 --kube-api-content-type="
        ),
        {
            "bindAddress": "010.0.0.1",
            "healthzBindAddress": "[::ffff:1.2.3.4]:10256",
            "clientConnection.qps": 0,
            "clientConnection.contentType": "",
            "clusterCIDR": "10.0.0.5/8",
            "nodePortAddresses": ["10.0.0.5/8", "::ffff:11.0.0.0/104"],
        },
        {
            "bind-address": "010.0.0.1",
            "healthz-bind-address": "[::ffff:1.2.3.4]:10256",
            "kube-api-qps": "0",
            "kube-api-content-type": "",
            "cluster-cidr": "10.0.0.5/8",
            "nodeport-addresses": "[10.0.0.5/8,::ffff:11.0.0.0/104]",
        },
    ),
    (
        "",
        "--hostname-override=\u2003FOO.bar",
        {"hostnameOverride": "foo.bar"},
        {"hostname-override": "\u2003FOO.bar"},
    ),
    (
        "",
        (
            '--bind-address= --healthz-bind-address=010.0.0.1:00080 --nodeport-addresses= --ipvs-exclude-cidrs=x,"a,b"'
            " --detect-local-mode= --iptables-sync-period=90s --kube-api-qps=1_0.50 --kube-api-burst=0o17"
        ),
        {
            "healthzBindAddress": "010.0.0.1:00080",
            "nodePortAddresses": [],
            "ipvs.excludeCIDRs": ["x", "a,b"],
            "iptables.syncPeriod": "1m30s",
            "clientConnection.qps": 10.5,
            "clientConnection.burst": 15,
        },
        {
            "bind-address": "",
            "healthz-bind-address": "010.0.0.1:00080",
            "ipvs-exclude-cidrs": '[x,"a,b"]',
            "iptables-sync-period": "1m30s",
            "kube-api-qps": "10.5",
            "kube-api-burst": "15",
        },
    ),
    (
        "",
        (
            "--masquerade-all=t --feature-gates=B=1,A=f --cleanup=true --vmodule=x=3 --iptables-backend=nft"
            " --log-text-split-stream=true"
        ),
        {
            "iptables.masqueradeAll": True,
            "featureGates.A": False,
            "featureGates.B": True,
            "logging.vmodule": [{"filePattern": "x", "verbosity": 3}],
            "logging.options.text.splitStream": True,
            "pykubeproxy.iptablesBackend": "nft",
        },
        {
            "masquerade-all": "true",
            "feature-gates": "A=false,B=true",
            "cleanup": "true",
            "vmodule": "x=3",
            "iptables-backend": "nft",
            "log-text-split-stream": "true",
        },
    ),
    ("", "--healthz-port=0", {"healthzBindAddress": ""}, {"healthz-bind-address": "", "healthz-port": "0"}),
    (
        "",
        "--healthz-port=7 --healthz-bind-address=127.0.0.1",
        {"healthzBindAddress": "127.0.0.1:7"},
        {"healthz-bind-address": "127.0.0.1:7", "healthz-port": "7"},
    ),
    ("", "--healthz-bind-address=", {}, {"healthz-bind-address": ""}),
    ("", "--healthz-port=0 --write-config-to=x", {}, {"healthz-port": "0", "write-config-to": "x"}),
    (
        """\
hostnameOverride: FOO.bar
bindAddress: 010.0.0.1
healthzBindAddress: 010.0.0.1:000080
metricsBindAddress: "::ffff:1.2.3.4"
clusterCIDR: 10.0.0.5/8
nodePortAddresses: []
clientConnection: {qps: 0, contentType: ""}
logging: {flushFrequency: 7000000000}
portRange: 1-2
nftables: {masqueradeBit: 99, masqueradeAll: true, syncPeriod: 7s, minSyncPeriod: 3s}
ipvs: {syncPeriod: 7s, minSyncPeriod: 3s, tcpTimeout: 1500ms}
mode: ""
""",
        "--config=x --healthz-bind-address=1.2.3.4 --healthz-port=0",
        {
            "hostnameOverride": "FOO.bar",
            "bindAddress": "010.0.0.1",
            "healthzBindAddress": "010.0.0.1:000080",
            "metricsBindAddress": "[::ffff:1.2.3.4]:10249",
            "clusterCIDR": "10.0.0.5/8",
            "nodePortAddresses": [],
            "logging.flushFrequency": 7000000000,
            "nftables.masqueradeBit": 99,
            "ipvs.tcpTimeout": "1.5s",
        },
        {
            "config": "x",
            "healthz-bind-address": "1.2.3.4",
            "healthz-port": "0",
            "detect-local-mode": "",
            "proxy-mode": "",
        },
    ),
)

# Flags whose values have blanks.
REFUSED_BLANKS = (
    {"cluster-cidr": "10.0.0.0/8, fd00::/8"},
    {"nodeport-addresses": "10.0.0.0/8, fd00::/8"},
    {"kube-api-qps": " 5"},
    {"kube-api-burst": " 5"},
    {"feature-gates": " "},
)


def lines(table: str) -> list[str]:
    """Return the cases of a table."""
    return table.splitlines()


def flags(line: str) -> dict[str, object]:
    """Return the flags of a command line, as `load` takes them."""
    given: dict[str, list[str]] = {}
    for word in line.split(" "):
        name, _, value = word.removeprefix("--").partition("=")
        given.setdefault(name, []).append(value)
    return {name: texts[0] if len(texts) == 1 else texts for name, texts in given.items()}


@pytest.mark.parametrize("body", lines(TAKEN_FIELDS + ONLY_HERE_FIELDS))
def test_a_field_that_kube_proxy_takes_is_taken(body: str) -> None:
    """Without a warning."""
    read(body.replace("\\n", "\n"))


@pytest.mark.parametrize("body", lines(REFUSED_FIELDS))
def test_a_field_that_kube_proxy_refuses_is_refused(body: str) -> None:
    with pytest.raises(ConfigError, match=r"^\S+: .* is not valid: must .*$"):
        load(HEAD + body.replace("\\n", "\n"), {})


@pytest.mark.parametrize("line", lines(TAKEN_FLAGS + ONLY_HERE_FLAGS))
def test_a_flag_that_kube_proxy_takes_is_taken(line: str) -> None:
    """A deprecated flag may cause a warning."""
    load(None, flags(line))


@pytest.mark.parametrize("given", [*map(flags, lines(REFUSED_FLAGS)), *REFUSED_BLANKS])
def test_a_flag_that_kube_proxy_refuses_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^--\S+: .* is not valid: must .*$"):
        load(None, given)


@pytest.mark.parametrize(
    "body",
    ['"conntrack": {"maxPerCore": 32768.0}', '"conntrack": {"maxPerCore": 3e2}', '"oomScoreAdj": -0.0'],
)
def test_a_fraction_in_json_is_no_whole_number(body: str) -> None:
    """In YAML it is, because kube-proxy first converts YAML to JSON."""
    with pytest.raises(ConfigError, match=r" is not valid: must be a whole number"):
        load(JSON + body + "}", {})
    read(body.replace('"', ""))


def test_values_are_in_canonical_form() -> None:
    """Leading zeros are decimal, as Go reads them, and IPv4-mapped addresses are IPv4."""
    assert read("clusterCIDR: 010.0.0.0/08").detect_local.cluster_cidrs == ("10.0.0.0/8",)
    mapped = read('clusterCIDR: "::ffff:10.1.0.0/104,00fd00::/8"').detect_local.cluster_cidrs
    assert mapped == ("10.0.0.0/8", "fd00::/8")
    assert read('nodePortAddresses: ["::ffff:10.0.0.0/64"]').node_port_addresses == ("::/64",)
    assert read('bindAddress: "::ffff:010.0.0.1"').bind_address == "10.0.0.1"
    assert str(read('healthzBindAddress: "[::ffff:1.2.3.04]:080"').health_address) == "1.2.3.4:80"
    assert load(None, flags("--kube-api-burst=010")).config.client.burst == 8
    assert load(None, flags('--nodeport-addresses="10.0.0.0/8",11.0.0.0/8')).config.node_port_addresses == (
        "10.0.0.0/8",
        "11.0.0.0/8",
    )


def test_a_negative_rate_is_no_limit() -> None:
    """Nor are the other values that Go takes by flag and that are not above 0; 0 means the default."""
    assert read("clientConnection: {qps: -1}").client.qps == -1
    for text in ("-1", "nan", "inf", "-Infinity"):
        assert load(None, {"kube-api-qps": text}).config.client.qps == -1
    # As a 32-bit float this is 0.
    assert read("clientConnection: {qps: 1e-60}") == read("")
    assert load(None, flags("--kube-api-qps=0 --kube-api-burst=0")).config.client == read("").client
    assert load(None, flags("--kube-api-qps=0 --kube-api-burst=7")).config.client.burst == 7


def test_values_for_another_mode_are_kept_as_they_are() -> None:
    """Nothing reads them, and /configz shows them."""
    local = read('detectLocalMode: NodeCIDR\nclusterCIDR: "10.0.0.0/8,x"').detect_local
    assert local.cluster_cidrs == ("10.0.0.0/8", "x")
    assert read("detectLocal: {interfaceNamePrefix: cali+}").detect_local.interface_name_prefix == "cali+"
    ipvs = read("ipvs: {excludeCIDRs: [010.0.0.0/8, x], tcpTimeout: -1s}").document["ipvs"]
    assert isinstance(ipvs, dict)
    assert (ipvs["excludeCIDRs"], ipvs["tcpTimeout"]) == (["010.0.0.0/8", "x"], "-1s")


def test_gates_without_a_value_are_off() -> None:
    assert read("featureGates: {A: null}").feature_gates.gates == (("A", False),)


def test_repeated_vmodule_flags_add_up() -> None:
    logging = load(None, {"vmodule": ["a=1,", "b=2"]}).config.document["logging"]
    assert isinstance(logging, dict)
    assert [item["filePattern"] for item in logging["vmodule"]] == ["a", "b"]


def by_path(document: Mapping[str, object], path: str = "") -> dict[str, object]:
    """Return the values of a document by dotted path."""
    found: dict[str, object] = {}
    for key, value in document.items():
        found |= by_path(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
    return found


@pytest.mark.parametrize(("body", "line", "fields", "shown"), SHOWN)
def test_values_are_shown_as_given(
    body: str, line: str, fields: dict[str, object], shown: dict[str, str]
) -> None:
    """In /configz and a written file, and in /flagz, wherever kube-proxy does so."""
    default, given = load(None, {}).config, flags(line)
    config = load(HEAD + body if "config" in given else None, given).config
    assert config.document == nested(by_path(default.document) | fields)
    assert flag_values(given, config) == flag_values({}, default) | shown


@pytest.mark.parametrize("head", [HEAD.replace("kind", "Kind"), HEAD.replace("apiVersion", "APIVERSION")])
def test_the_case_of_kind_and_version_does_not_matter(head: str) -> None:
    assert load(head, {}) == load(HEAD, {})
    config, (warning,) = load(head + "ClusterCIDR: 10.0.0.0/8", {})
    assert config == read("")
    assert warning.startswith("The field ClusterCIDR is unknown")


def test_words_for_node_port_addresses() -> None:
    """As in kube-proxy 1.37: localhost and all stand for networks, primary for the node's own addresses."""
    assert read("nodePortAddresses: [primary, localhost, 10.0.0.5/8]").node_port_addresses == (
        "primary",
        "127.0.0.0/8",
        "::1/128",
        "10.0.0.0/8",
    )
    assert read("nodePortAddresses: [all]").node_port_addresses == ("0.0.0.0/0", "::/0")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("0s", 0.0),
        ("30s", 30.0),
        ("1m30s", 90.0),
        ("1.5h", 5400.0),
        ("300ms", 0.3),
        (".5s", 0.5),
        ("1.s", 1.0),
        ("15m0s", 900.0),
        ("2h22m", 8520.0),
        ("7us", 0.000007),
        ("7\u00b5s", 0.000007),
        ("7\u03bcs", 0.000007),
        ("1ns", 1e-9),
        ("-5s", -5.0),
        ("+5s", 5.0),
    ],
)
def test_go_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "s", ".s", "1x", "1 s", "-", "1m-1s", "1s ", "\u0661s", "9" * 30 + "h"]
)
def test_anything_else_is_refused(text: str) -> None:
    """Text that Go refuses raises ValueError: no unit, no digits, blanks, foreign digits, too long a time."""
    with pytest.raises(ValueError, match="must be a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (1e-9, "1ns"),
        (1.5e-6, "1.5\u00b5s"),
        (0.3, "300ms"),
        (1.0, "1s"),
        (60.0, "1m0s"),
        (90.5, "1m30.5s"),
        (900.0, "15m0s"),
        (86400.0, "24h0m0s"),
        (-2.0, "-2s"),
    ],
)
def test_durations_are_written_as_go_prints_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


# Up to 2**50 ns (13 days) a float holds every nanosecond apart from the next.
@given(st.integers(min_value=-(2**50), max_value=2**50))
def test_what_is_written_reads_back(nanoseconds: int) -> None:
    seconds = nanoseconds / 10**9
    assert parse_duration(duration_text(seconds)) == seconds


@given(st.text(alphabet="0123456789.hmnsu\u00b5-+", max_size=12))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    """No text raises anything but ValueError, and one that is read is written so that it reads the same."""
    try:
        seconds = parse_duration(text)
    except ValueError:
        return
    again = parse_duration(duration_text(seconds))
    assert again == pytest.approx(seconds, rel=1e-15, abs=1e-9)
