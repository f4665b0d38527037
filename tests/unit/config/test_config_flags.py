"""Flags without and with a configuration file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.config import ACTIONS, SETTINGS, Address, Config, ConfigError, LogFormat, load
from pykubeproxy.config.model import IptablesBackend

FILE = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def of(**flags: object) -> Config:
    """The Config of flags alone, written with underscores; they must give no warning."""
    config, warnings = load(None, {name.replace("_", "-"): value for name, value in flags.items()})
    assert warnings == ()
    return config


@pytest.mark.parametrize("text", ["1", "t", "T", "true", "TRUE", "True", True])
def test_what_go_takes_for_true(text: object) -> None:
    """Each of Go's words for true turns a flag on."""
    assert of(masquerade_all=text).iptables.masquerade_all is True


@pytest.mark.parametrize("text", ["0", "f", "F", "false", "FALSE", "False", False])
def test_what_go_takes_for_false(text: object) -> None:
    """Each of Go's words for false turns a flag off."""
    assert of(iptables_localhost_nodeports=text).iptables.localhost_node_ports is False


def test_lists_may_be_joined_and_repeated() -> None:
    """A list is comma-separated, and a flag given again adds to it; an empty one is empty."""
    assert of(nodeport_addresses=("10.0.0.0/8,11.0.0.0/8", "fd00::/64")).node_port_addresses == (
        "10.0.0.0/8",
        "11.0.0.0/8",
        "fd00::/64",
    )
    assert of(nodeport_addresses="primary").node_port_addresses == ("primary",)
    assert of(nodeport_addresses="").node_port_addresses == ()


def test_feature_gates_are_a_list_of_pairs() -> None:
    """Gates are NAME=BOOL; those unknown here are kept."""
    gates = of(feature_gates=("B=true,A=0", "AllowServiceExternalIPs=false")).feature_gates
    assert gates.gates == (("A", False), ("AllowServiceExternalIPs", False), ("B", True))
    assert not gates.allow_service_external_ips
    assert of().feature_gates.allow_service_external_ips


def test_zero_by_flag_is_zero_where_that_means_something() -> None:
    """A minSyncPeriod of 0 can be had by flag; elsewhere 0 or empty is the default."""
    assert of(iptables_min_sync_period="0").iptables.min_sync_period == 0.0
    assert of(hostname_override="", proxy_mode="") == of()
    assert of(kube_api_qps="0", kube_api_burst="0").client == of().client


def test_flags_without_an_address_leave_the_servers_at_their_defaults() -> None:
    """Neither an empty address nor an IPv6 --bind-address moves them; only --healthz-port 0 turns one off."""
    assert of(healthz_bind_address="", metrics_bind_address="") == of()
    for address in ("fd00::1", "::"):
        config = of(bind_address=address)
        assert config.bind_address == address
        assert config.health_address == Address("0.0.0.0", 10256)
        assert config.metrics_address == Address("127.0.0.1", 10249)


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_a_deprecated_port_is_checked_where_it_counts(port: str) -> None:
    """An address that has a port of its own keeps it."""
    config, _ = load(None, {"healthz-port": port, "healthz-bind-address": "10.0.0.1:7"})
    assert config.health_address == Address("10.0.0.1", 7)
    with pytest.raises(ConfigError, match=rf"^--healthz-port: {port} is not valid: must be a port from 1 to"):
        load(None, {"healthz-port": port, "healthz-bind-address": "10.0.0.1"})


@pytest.mark.parametrize("flag", ["iptables-sync-period", "config-sync-period"])
def test_a_period_of_zero_is_refused(flag: str) -> None:
    """The two periods that must be greater than 0 are, by flag, where 0 is not the default."""
    with pytest.raises(ConfigError, match=rf"^--{flag}: 0s is not valid: must be greater than 0$"):
        of(**{flag: "0"})


def test_an_error_names_the_flag() -> None:
    """A value that came by flag is named by its flag."""
    with pytest.raises(
        ConfigError, match=r'^--iptables-masquerade-bit: "40" is not valid: must be a whole number'
    ):
        of(iptables_masquerade_bit="40")
    with pytest.raises(ConfigError, match=r"^--no-such: unknown flag$"):
        of(no_such="1")


def test_an_address_may_leave_its_port_to_the_default() -> None:
    """An IP alone gets the server's own port."""
    assert of(healthz_bind_address="::1", metrics_bind_address="10.0.0.1") == of(
        healthz_bind_address="[::1]:10256", metrics_bind_address="10.0.0.1:10249"
    )


def test_the_deprecated_ports() -> None:
    """--healthz-port and --metrics-port: 0 turns a server off, another completes an address; each gives a warning."""
    config, warnings = load(
        None, {"healthz-port": "0", "metrics-port": "7", "metrics-bind-address": "10.0.0.1"}
    )
    assert (config.health_address, config.metrics_address) == (None, Address("10.0.0.1", 7))
    assert warnings == (
        "The flag --healthz-port is deprecated; use --healthz-bind-address instead.",
        "The flag --metrics-port is deprecated; use --metrics-bind-address instead.",
    )
    assert load(None, {"healthz-port": "7"}).config == of()


def test_the_deprecated_ports_are_read_as_all_numbers_are() -> None:
    """In any form that Go takes; of one that stands twice the last counts."""
    flags = {"healthz-port": "0x7", "healthz-bind-address": ["::1", "10.0.0.1"], "metrics-port": ["7", "+0"]}
    config = load(None, flags).config
    assert (config.health_address, config.metrics_address) == (Address("10.0.0.1", 7), None)


def test_beside_a_file_most_flags_do_not_count() -> None:
    """kube-proxy's own flags give way to the file, defaults included; a warning says where to set them."""
    flags = {"cluster-cidr": "10.0.0.0/8", "ipvs-sync-period": "5s", "healthz-port": "0"}
    config, warnings = load(FILE + "oomScoreAdj: 5", flags)
    assert config == load(FILE + "oomScoreAdj: 5", {}).config
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
    config, warnings = load(FILE + body, flags)
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
    """Whatever text a flag has, nothing is raised but a ConfigError of one line."""
    try:
        load(None, flags)
    except ConfigError as error:
        assert "\n" not in str(error)
