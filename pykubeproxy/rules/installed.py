"""What rules that are already there lead to UDP services, whoever wrote them.

A process that starts finds rules of services which were deleted while none was running. It takes the rules out; the
flows that these had made it can know from nowhere else.
"""

import re

from pykubeproxy.rules.ruleset import Ruleset

# The rule of a service port's address (with -d) or node port (without) is in KUBE-SERVICES or KUBE-NODEPORTS, or in a
# chain below one of these, and reads the same everywhere.
_WAY_IN = re.compile(r"(?:-d (\S+)/(?:32|128) )?-p udp .*--dport (\d+) -j KUBE-(?:SVC|SVL|EXT|FW)-")


def udp_frontends(installed: Ruleset) -> frozenset[tuple[str, int]]:
    """Each address and port that leads to a UDP service port; the address of a node port is empty."""
    matches = (
        _WAY_IN.match(rule)
        for chain, rules in installed.of_table("nat")
        if chain.startswith("KUBE-")
        for rule in rules
        if "-p udp" in rule
    )
    return frozenset((match[1] or "", int(match[2])) for match in matches if match)
