"""Rules of older versions of kube-proxy mean the same as new ones for the same objects, and a change is found in both."""

import re
from collections.abc import Callable

import pytest

from pykubeproxy.inspect.meaning.comparison import proxy_part
from pykubeproxy.inspect.meaning.outcomes import MeaningChange, older_version
from pykubeproxy.inspect.packets.packet import NodeNetwork
from pykubeproxy.objects import Family
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from tests.cases import ADDRESSES, NAMES, cluster_of, config_of, expected, load_case, node_of
from tests.older_forms import Form, rules_in_form
from tests.traces import compare_meaning

NODE = NodeNetwork(frozenset(ADDRESSES))
RICH = "clusterip-three"
OLDER = (Form.V1_22, Form.V1_25)
# Cases without settings or Services that 1.22 treats otherwise.
CASES = [
    it
    for it in NAMES
    if it.split("-")[0] in ("affinity", "clusterip", "externalips", "etp", "lb", "nodeport", "dual", "no")
    or it == "random-7-019"
]


def in_form(name: str, form: Form, family: Family = Family.IPV4) -> Ruleset:
    case = load_case(name)
    node = node_of(case)
    facts = KernelFacts(addresses=ADDRESSES)
    context = rule_context(config_of(case), node.name, node, facts, family)
    return proxy_part(rules_in_form(form, cluster_of(case), context))


def changes(older: Ruleset, newer: Ruleset, name: str = RICH) -> list[MeaningChange]:
    """Return the differences that no version explains."""
    cluster_ips = {ip for it in cluster_of(load_case(name)).services() for ip in it.cluster_ips}
    version = older_version(older)
    return [it for it in compare_meaning(older, newer, NODE) if not version.explains(it, NODE, cluster_ips)]


@pytest.mark.parametrize("form", OLDER)
@pytest.mark.parametrize("name", CASES)
def test_an_older_form_means_the_same(name: str, form: Form) -> None:
    for family in Family:
        older, newer = in_form(name, form, family), proxy_part(expected(load_case(name), family))
        assert changes(older, newer, name) == []


def test_nfacct_objects_mean_nothing() -> None:
    assert changes(in_form(RICH, Form.V1_30), in_form(RICH, Form.V1_36)) == []


def edited(rules: Ruleset, pattern: str, edit: Callable[[list[str], int], object]) -> Ruleset:
    """Return the rules with an edit at the first rule in nat that matches."""
    for key, some in rules.chains.items():
        for position, rule in enumerate(some):
            if key.table == "nat" and re.search(pattern, f"{key.chain} {rule}"):
                texts = list(some)
                edit(texts, position)
                return Ruleset(rules.family, {**rules.chains, key: tuple(texts)})
    raise AssertionError(f"no rule has {pattern}")


def replace(pattern: str, by: str) -> Callable[[list[str], int], object]:
    def edit(rules: list[str], at: int) -> None:
        rules[at] = re.sub(pattern, by, rules[at])

    return edit


def delete(rules: list[str], at: int) -> None:
    del rules[at]


def swap(rules: list[str], at: int) -> None:
    rules[at], rules[at + 1] = rules[at + 1], rules[at]


MUTATIONS = {
    "endpoint": ("-j DNAT --to-destination", replace(r":(\d+)$", r":1\1")),
    "share": ("--probability 0.", replace(r"--probability \S+", "--probability 0.90000000000")),
    "mark": (r"^KUBE-SEP-\S+ -s 10\.244\..*-j KUBE-MARK-MASQ", delete),
    "masquerading": (r"! -s .*-j KUBE-MARK-MASQ", delete),
    "order": ("--probability 0.[45]", swap),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("form", Form)
def test_a_mutation_of_any_form_is_found(form: Form, mutation: str) -> None:
    older, newer = in_form(RICH, form), in_form(RICH, Form.V1_36)
    assert changes(edited(older, *MUTATIONS[mutation]), newer)


def test_a_missing_firewall_is_no_older_version_though_an_older_kubelet_runs() -> None:
    """The kubelet before 1.28 writes KUBE-MARK-DROP, whatever the version of kube-proxy."""
    name = next(it for it in CASES if "KUBE-FW-" in str(in_form(it, Form.V1_36).chains))
    newer = in_form(name, Form.V1_36)
    firewall = "KUBE-PROXY-FIREWALL"
    chains = {
        key: tuple(it for it in some if not it.endswith(firewall))
        for key, some in newer.chains.items()
        if key.chain != firewall
    }
    marking = {ChainKey("nat", "KUBE-MARK-DROP"): ("-j MARK --set-xmark 0x8000/0x8000",)}
    assert changes(Ruleset(newer.family, {**newer.chains, **marking}), newer, name) == []
    found = changes(Ruleset(newer.family, {**chains, **marking}), newer, name)
    assert any(not it.origin.on_node for it in found)


@pytest.mark.parametrize("decimals", [5, 10])
def test_the_number_of_decimals_of_a_share_means_nothing(decimals: int) -> None:
    rules = in_form(RICH, Form.V1_36)

    def rounded(match: re.Match[str]) -> str:
        return f"--probability {float(match[1]):.{decimals}f}"

    chains = {
        key: tuple(re.sub(r"--probability (\S+)", rounded, it) for it in some)
        for key, some in rules.chains.items()
    }
    assert chains != rules.chains
    assert changes(Ruleset(rules.family, chains), rules) == []


def test_a_rule_that_drops_packets_to_an_endpoint_is_found() -> None:
    """After DNAT, packets meet table filter with the address of the endpoint."""
    rules = in_form(RICH, Form.V1_36)
    endpoint = next(
        found[1]
        for some in rules.chains.values()
        for it in some
        if (found := re.search(r"--to-destination (10\.244\.\S+):\d+$", it))
    )
    forward = ChainKey("filter", "KUBE-FORWARD")
    for text in (f"-d {endpoint}/32 -j DROP", f"-d {endpoint}/31 -j DROP"):
        chains = {**rules.chains, forward: (text, *rules.chains[forward])}
        assert changes(rules, Ruleset(rules.family, chains)), text


def test_chains_of_other_programs_are_no_part_of_the_proxy() -> None:
    """kube-router has chains with such names for network policies."""
    rules = in_form(RICH, Form.V1_36)
    forward = ChainKey("filter", "FORWARD")
    others = {
        forward: ("-j KUBE-ROUTER-FORWARD", *rules.chains[forward]),
        ChainKey("filter", "KUBE-ROUTER-FORWARD"): ("-j DROP",),
    }
    assert changes(rules, proxy_part(Ruleset(rules.family, {**rules.chains, **others}))) == []
