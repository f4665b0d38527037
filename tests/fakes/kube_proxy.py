"""What the stand-ins for kube-proxy share."""

import re
from collections.abc import Iterable

from pykubeproxy.rules.ruleset import ChainKey

_PER_SERVICE = re.compile("KUBE-(SVC|SVL|FW|EXT|SEP)-")


def without_unknown(nat: Iterable[str], live: Iterable[ChainKey]) -> list[str]:
    """Return lines for table nat that also delete the live chains of Services that the lines do not declare."""
    lines = [*nat]
    known = {line[1:].partition(" ")[0] for line in lines if line.startswith(":")}
    stale = [key.chain for key in live if _PER_SERVICE.match(key.chain) and key.chain not in known]
    return [*(f":{chain} - [0:0]" for chain in stale), *lines, *(f"-X {chain}" for chain in stale)]
