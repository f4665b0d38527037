"""The tables of a node, as several nodes are inspected."""

from collections.abc import Mapping

import msgspec

from pykubeproxy.objects import Family, Node
from pykubeproxy.rules.ruleset import Ruleset


class NodeTables(msgspec.Struct, frozen=True):
    """A node and its rules by family. `proxy` names its proxy, and `pod` the pod that was asked; "" if unknown."""

    node: Node
    rulesets: Mapping[Family, Ruleset]
    proxy: str = ""
    pod: str = ""
