"""Facts about the kernel of another node, from its rules."""

from itertools import product

import pytest

from pykubeproxy.config import load
from pykubeproxy.objects import Family, Node
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.inferred import inferred_facts
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import Ruleset
from tests.cases import cluster_of, load_case


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("dispatch", ["flat", "tree"])
@pytest.mark.parametrize("features", list(product((True, False), repeat=3)))
def test_rules_rendered_with_inferred_facts_are_equal(
    family: Family, dispatch: str, features: tuple[bool, bool, bool]
) -> None:
    """For every combination of kernel facts."""
    random_fully, nfacct, liberal = features
    config = load(None, {"dispatch": dispatch}).config
    cluster = cluster_of(load_case("nodeport"))

    def rendered(facts: KernelFacts) -> Ruleset:
        return render(cluster, rule_context(config, "node1", Node("node1"), facts, family))

    there = rendered(KernelFacts((), random_fully, nfacct, liberal))
    assert dict(rendered(inferred_facts(there, ())).chains) == dict(there.chains)


def test_without_rules_the_kernel_has_all_features() -> None:
    assert inferred_facts(Ruleset(Family.IPV4, {}), ("10.0.0.1",)) == KernelFacts(("10.0.0.1",))
