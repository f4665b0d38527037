"""Preflight checks of tools, tables and other processes."""

from pathlib import Path

import pytest

from pykubeproxy.inspect.check import this_node as checks
from pykubeproxy.inspect.check.report import Level
from pykubeproxy.kernel.features import MissingFeature, Trial
from pykubeproxy.kernel.iptables import Backend, Tools
from pykubeproxy.kernel.system import Listener, Process
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey

DOCS = Path(__file__).parents[3] / "docs"
AGENT = Process(7, ("/opt/bin/python3", "/opt/bin/pykubeproxy", "run", "--v=2"))
KUBE_PROXY = Process(8, ("/usr/local/bin/kube-proxy", "--config=/etc/config.conf"))
LISTING = Process(9, ("python3", "-u", "/opt/bin/pykubeproxy", "dump-rules", "--watch"))


def version_of(backend: Backend, version: tuple[int, int, int]) -> Level:
    return checks.version(Tools(backend, Family.IPV4, "iptables", "", "", version)).level


def test_old_iptables_versions_fail() -> None:
    """nft versions with a known defect are a warning."""
    assert version_of(Backend.LEGACY, (1, 6, 1)) is Level.FAIL
    assert version_of(Backend.LEGACY, (1, 6, 2)) is Level.OK
    assert version_of(Backend.LEGACY, (1, 8, 2)) is Level.OK
    assert version_of(Backend.NFT, (1, 8, 3)) is Level.WARN
    assert version_of(Backend.NFT, (1, 8, 4)) is Level.OK


BOTH = frozenset({"CAP_NET_ADMIN", "CAP_NET_RAW"})


@pytest.mark.parametrize(
    ("capabilities", "agents", "level", "text"),
    [
        (BOTH, None, Level.OK, "CAP_NET_ADMIN and CAP_NET_RAW are in effect"),
        (BOTH, BOTH, Level.OK, "CAP_NET_ADMIN and CAP_NET_RAW are in effect"),
        ({"CAP_NET_ADMIN"}, None, Level.SKIP, "this process lacks CAP_NET_RAW"),
        (set(), None, Level.SKIP, "this process lacks CAP_NET_ADMIN and CAP_NET_RAW"),
        (set(), BOTH, Level.SKIP, "this process lacks CAP_NET_ADMIN and CAP_NET_RAW"),
        (BOTH, {"CAP_NET_RAW"}, Level.FAIL, "the agent lacks CAP_NET_ADMIN"),
        (set(), set(), Level.FAIL, "the agent lacks CAP_NET_ADMIN and CAP_NET_RAW"),
    ],
)
def test_missing_capabilities_are_named(
    capabilities: set[str], agents: set[str] | None, level: Level, text: str
) -> None:
    """Those of the agent fail. Without those of this process, some checks cannot run, which tells nothing."""
    known = None if agents is None else frozenset(agents)
    found = checks.privileges(frozenset(capabilities), known)
    assert (found.level, found.message) == (level, text)


def test_the_advice_on_capabilities_fits_the_place() -> None:
    """A pod gets them from its profile."""
    assert "as root" in checks.privileges(frozenset()).advice
    assert "--profile sysadmin" in checks.privileges(frozenset(), in_pod=True).advice


def test_missing_features_name_the_module() -> None:
    """Required features fail; optional ones are a warning."""
    missing = (
        MissingFeature("match statistic", "xt_statistic", "not known", True),
        MissingFeature("match sctp", "xt_sctp", "not known", False),
    )
    required, optional = checks.features(Trial(missing), Family.IPV4, True)
    assert (required.level, optional.level) == (Level.FAIL, Level.WARN)
    assert "Load xt_statistic with modprobe" in required.advice
    assert [
        it.level for it in checks.features(Trial(missing[1:], untested="not permitted"), Family.IPV4, True)
    ] == [
        Level.WARN,
        Level.SKIP,
    ]
    assert [it.level for it in checks.features(Trial(()), Family.IPV4, True)] == [Level.OK]


def test_a_feature_that_the_other_family_needs_is_a_warning() -> None:
    """The agent serves the first family alone."""
    missing = MissingFeature("REJECT", "ip6t_REJECT", "not known", True)
    (found,) = checks.features(Trial((missing,)), Family.IPV6, False)
    assert found.level is Level.WARN
    assert found.advice.endswith("Until then IPv6 is not served.")


def test_a_missing_primary_family_fails() -> None:
    """The other family is optional."""
    assert checks.unavailable("no NAT", Family.IPV4, primary=True).level is Level.FAIL
    assert checks.unavailable("no NAT", Family.IPV6, primary=False).level is Level.WARN


def unused(*chains: tuple[str, str, int]) -> tuple[Level, str]:
    found = checks.not_in_use(
        Backend.LEGACY, Family.IPV4, {ChainKey(table, chain): rules for table, chain, rules in chains}
    )
    return found.level, found.message


def test_proxy_chains_in_the_other_backend_fail() -> None:
    """Chains of others are a warning; empty tables pass."""
    built_in = ("nat", "PREROUTING", 0)
    assert unused(built_in)[0] is Level.OK
    assert unused(built_in, ("nat", "KUBE-SVC-ABCDEFGHIJKLMNOP", 3), ("filter", "DOCKER", 1)) == (
        Level.FAIL,
        "legacy, not in use, has 1 chain of a service proxy too",
    )
    kubelet = unused(("mangle", "KUBE-KUBELET-CANARY", 0), ("filter", "DOCKER", 1))
    assert kubelet[0] is Level.WARN
    assert kubelet[1].startswith("the kubelet writes to legacy")
    # Proxies and the kubelet write KUBE-FIREWALL; only hint chains are the kubelet's alone.
    proxy = unused(("filter", "KUBE-FIREWALL", 1), ("filter", "INPUT", 1))
    assert proxy == (Level.WARN, "legacy, not in use, has a chain KUBE-FIREWALL that a service proxy left")
    assert unused(("filter", "KUBE-ROUTER-INPUT", 1))[1].startswith("legacy, not in use, has rules of other")
    assert unused(("nat", "PREROUTING", 1), ("filter", "DOCKER", 0)) == (
        Level.WARN,
        "legacy, not in use, has rules of other programs (DOCKER and PREROUTING)",
    )


@pytest.mark.parametrize(
    ("nftables", "servers", "interface", "chains", "level"),
    [
        ([], 0, False, [], Level.OK),
        ([], 0, False, [ChainKey("nat", "KUBE-SERVICES")], Level.OK),
        (["ip6 kube-proxy"], 0, False, [], Level.WARN),
        ([], 1, False, [], Level.FAIL),
        (["ip kube-proxy"], 0, True, [], Level.FAIL),
        ([], 0, False, [ChainKey("nat", "KUBE-LOAD-BALANCER")], Level.WARN),
    ],
)
def test_leftovers_that_intercept_packets_fail(
    nftables: list[str], servers: int, interface: bool, chains: list[ChainKey], level: Level
) -> None:
    """Other leftovers are a warning."""
    assert checks.other_modes(nftables, servers, interface, chains).level is level


@pytest.mark.parametrize(
    ("running", "level"),
    [
        ([], Level.OK),
        ([AGENT, LISTING], Level.OK),
        ([KUBE_PROXY], Level.WARN),
        ([AGENT, KUBE_PROXY], Level.FAIL),
        ([AGENT, Process(10, AGENT.arguments)], Level.WARN),
        ([AGENT, Process(11, ("sudo", "pykubeproxy", "run"))], Level.OK),
        ([AGENT, Process(12, ("pykubeproxy", "run")), LISTING], Level.WARN),
        ([AGENT, Process(13, ("python3", "-c", "from pykubeproxy.cli import main", "run"))], Level.WARN),
        ([Process(14, ("grep", "kube-proxy")), Process(15, ())], Level.OK),
    ],
)
def test_two_proxies_that_write_rules_fail(running: list[Process], level: Level) -> None:
    """A second agent waits. Other pykubeproxy commands do not count."""
    assert checks.proxies(running).level is level


@pytest.mark.parametrize("page", ["migrate/canary.md", "operations/index.md"])
def test_guides_and_check_say_the_same_about_kube_proxy_beside_the_agent(page: str) -> None:
    """Operators find one answer wherever they look."""
    text = " ".join((DOCS / page).read_text().split())
    assert checks.BOTH in text
    assert all(checks.BOTH in checks.proxies(it).advice for it in ([KUBE_PROXY], [AGENT, KUBE_PROXY]))


@pytest.mark.parametrize(
    ("taken", "level"),
    [
        ([], Level.OK),
        ([Listener(10249, KUBE_PROXY)], Level.OK),
        ([Listener(10256, AGENT)], Level.OK),
        ([Listener(10256, KUBE_PROXY)], Level.WARN),
        ([Listener(10256, None), Listener(10256, LISTING)], Level.FAIL),
        ([Listener(10256, AGENT), Listener(10256, LISTING)], Level.FAIL),
        ([Listener(10256, None)], Level.WARN),
    ],
)
def test_ports_used_by_other_programs_fail(taken: list[Listener], level: Level) -> None:
    """Ports of the agent and of kube-proxy, which it replaces, do not."""
    (found,) = checks.ports({"healthz-bind-address": 10256}, taken)
    assert found.level is level


@pytest.mark.parametrize(
    ("words", "master"),
    [
        (("--master", "http://10.0.0.1:6443"), "http://10.0.0.1:6443"),
        (("--master=http://10.0.0.1:6443", "-v=4"), "http://10.0.0.1:6443"),
        (("--config", "f.yaml"), ""),
        (("--master",), ""),
    ],
)
def test_the_api_server_of_the_agent_is_that_of_its_command_line(words: tuple[str, ...], master: str) -> None:
    assert checks.flag_of(Process(7, ("/usr/bin/pykubeproxy", "run", *words)), "master") == master
