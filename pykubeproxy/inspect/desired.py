"""The rules a node ought to have, with the jumps to them: what its tables hold if nobody else writes there."""

from pykubeproxy.rules import skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import Ruleset


def as_installed(rendered: Ruleset, options: RuleOptions) -> Ruleset:
    """A rendered Ruleset as it stands in tables that were empty before."""
    firewall = {skeleton.KUBELET_FIREWALL: skeleton.kubelet_firewall(options)}
    return Ruleset(rendered.family, {**skeleton.JUMPS, **firewall, **rendered.chains})
