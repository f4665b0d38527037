"""Read live tables chain by chain, compared with reading them whole."""

import pytest

from pykubeproxy.inspect.dump.model import views
from pykubeproxy.inspect.dump.render_rules import OTHER_CHAINS, listing
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.kernel import (
    Backend,
    Failed,
    Iptables,
    Runner,
    live_ruleset,
    live_ruleset_about,
    open_iptables,
)
from pykubeproxy.objects import Family, Kind, Listed, Port, Protocol
from pykubeproxy.rules.ruleset import ChainKey, Count, Ruleset
from pykubeproxy.rules.skeleton import SHARED
from tests.cases import NAMES
from tests.fakes.synced import SyncedFamily
from tests.kernel.test_dump_rules import write_rules
from tests.objects import service, slice_of

pytestmark = pytest.mark.root

SERVICES = 300
# Legacy is always read as a whole.
nft_only = pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"])


class CountingRunner(Runner, frozen=True):
    """A runner that records its commands."""

    ran: list[str] = []  # noqa: RUF012 - a Struct copies it

    def run(self, argv, text="", seconds=60):  # type: ignore[no-untyped-def]
        self.ran.append(argv[0])
        return super().run(argv, text, seconds)


@pytest.fixture
def many(inside: str, iptables: Iptables) -> Iptables:
    """Services with node ports in dispatch branches, one with many endpoints and one without any."""
    ipv6 = iptables.family is Family.IPV6
    ip, pod = ("fd00:96::%x", "fd00:244::%x:%x") if ipv6 else ("10.96.%d.10", "10.244.%d.%d")
    services = tuple(
        service(
            f"s{n}",
            cluster_ip=ip % (n % 256 if not ipv6 else n + 1),
            ports=(Port("http", Protocol.TCP, 80 + n // 256, 30000 + n),),
        )
        for n in range(SERVICES)
    )
    slices = tuple(
        slice_of(*(pod % (n % 256, m + 1) for m in range(150 if n == 7 else 2)), service=f"s{n}")
        for n in range(1, SERVICES)
    )
    SyncedFamily(Listed(Kind.SERVICE, services), Listed(Kind.ENDPOINT_SLICE, slices), live=iptables).sync()
    return iptables


@nft_only
@pytest.mark.parametrize("case", NAMES[::3])
def test_chain_by_chain_equals_whole_table(inside: str, iptables: Iptables, case: str) -> None:
    """Rules, counters and policy of each chain are the same."""
    write_rules(iptables, case, packets=3)
    iptables.restore("*filter\n:FORWARD DROP [0:0]\nCOMMIT\n")
    saved, counts = iptables.save_counted()
    ruleset, counters = live_ruleset(iptables)
    assert saved.policies == {ChainKey("filter", "FORWARD"): "DROP"}
    for key, rules in saved.chains.items():
        # iptables-nft-save shows the kernel's chains even where there are none yet.
        assert ruleset.chains.get(key, ()) == rules
        assert counters.get(key, ()) == counts.get(key, ())
        assert ruleset.policies.get(key, "ACCEPT") == saved.policies.get(key, "ACCEPT")
    assert ChainKey("nat", "KUBE-NONE") not in ruleset.chains
    assert ChainKey("raw", "KUBE-SERVICES") not in ruleset.chains


def test_counters_stay_beside_their_rules(inside: str, iptables: Iptables) -> None:
    """Reading with counters gives the same rules as reading without."""
    write_rules(iptables, "lb-source-ranges", packets=3)
    iptables.restore("*nat\n:BARE - [0:0]\n[4:240] -A BARE\n-A BARE\n[5:300] -A BARE -j RETURN\nCOMMIT\n")
    ruleset, counters = iptables.save_counted()
    assert ruleset == iptables.save()
    bare = ChainKey("nat", "BARE")
    assert ruleset.chains[bare] == ("", "", "-j RETURN")
    # ip6tables-nft-restore 1.8.9 loses the counts of restored rules.
    if (iptables.backend, iptables.family) != (Backend.NFT, Family.IPV6):
        assert counters[bare] == (Count(4, 240), Count(0, 0), Count(5, 300))


@nft_only
def test_part_equals_whole_table(many: Iptables) -> None:
    """A service's views and rules are the same, whether it has many chains, few or none."""
    ruleset, counters = many.save_counted()
    for name in ("s1", "s299", "s7", "s0"):
        service_filter = ServiceFilter("ns", name)
        part = live_ruleset_about(many, f"ns/{name}", SHARED, OTHER_CHAINS)
        assert part is not None
        assert views(*part, service_filter) == views(ruleset, counters, service_filter) != ()
        assert listing(part[0], service_filter) == listing(ruleset, service_filter) != ""
        assert len(part[0].chains) < len(ruleset.chains) / 2


@nft_only
def test_part_takes_few_commands(many: Iptables) -> None:
    """Chains of other services cost no command; a service with many chains is read in one."""
    counting = CountingRunner()
    opened = open_iptables(many.backend, many.family, counting)
    counting.ran.clear()
    live_ruleset_about(opened, "ns/s1", SHARED, OTHER_CHAINS)
    assert len(counting.ran) < 40
    assert opened.tools.save not in counting.ran
    live_ruleset_about(opened, "ns/s7", SHARED, OTHER_CHAINS)
    assert counting.ran.count(opened.tools.save) == 1


def test_unknown_name(many: Iptables) -> None:
    """The part is empty, or None if there are rules without a comment."""
    nothing: object = None if many.backend is Backend.LEGACY else (Ruleset(many.family, {}), {})
    assert live_ruleset_about(many, "ns/nobody", SHARED, OTHER_CHAINS) == nothing
    silent = "*nat\n:KUBE-SVC-SILENT - [0:0]\n-A KUBE-SERVICES -p tcp -j KUBE-SVC-SILENT\n"
    many.restore(f"{silent}-A KUBE-SVC-SILENT -j RETURN\nCOMMIT\n")
    assert live_ruleset_about(many, "ns/nobody", SHARED, OTHER_CHAINS) is None


def test_native_nft_rule_is_an_error(inside: str, runner: Runner) -> None:
    """A chain with a native nft rule raises, as the whole table does; other chains can be read."""
    iptables = open_iptables(Backend.NFT, Family.IPV4, runner)
    write_rules(iptables, "clusterip-one")
    assert runner.run(("nft", "add rule ip nat OUTPUT meta mark set ct mark")).exit_code == 0
    ruleset, _ = live_ruleset(iptables)
    assert "-j KUBE-SERVICES" in ruleset.chains[ChainKey("nat", "PREROUTING")][0]
    with pytest.raises(Failed, match="incompatible"):
        ruleset.chains[ChainKey("nat", "OUTPUT")]
