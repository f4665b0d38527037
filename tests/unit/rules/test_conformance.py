"""The rules equal those of kube-proxy in every recorded case."""

import pytest

from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import Ruleset
from tests.cases import ADDRESSES, NAMES, cluster_of, comparable, config_of, expected, load_case, node_of


@pytest.mark.parametrize("name", NAMES)
def test_same_rules_as_kube_proxy(name: str) -> None:
    """Chains and jumps of both families equal those of kube-proxy."""
    case = load_case(name)
    for family in Family:
        on = rule_context(config_of(case), "node1", node_of(case), KernelFacts(ADDRESSES), family)
        rendered = render(cluster_of(case), on)
        ensured = {**skeleton.JUMPS, skeleton.KUBELET_FIREWALL: skeleton.kubelet_firewall(on.options)}
        whole = Ruleset(family, {**rendered.chains, **ensured})
        assert comparable(whole) == comparable(expected(case, family))
