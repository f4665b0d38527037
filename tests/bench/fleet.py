"""Compare the rules of 500 generated nodes with the objects: `python -m tests.bench.fleet [NODES]`.

Prints milliseconds of processor time for each node, to read the text of iptables-save and to compare, and the memory used.
"""

import resource
import sys
import time

from pykubeproxy.inspect.fleet.model import FleetComparison, NodeVerdict
from pykubeproxy.inspect.node_tables import NodeTables
from pykubeproxy.rules.saves import SavedFile, read_saves
from tests.fleet import NodeKind, Size, cluster, nodes, saved, tables

_CHANGED = frozenset({3, 4, 5})
_VERDICTS = {NodeKind.FOLLOWS: NodeVerdict.FOLLOWS, NodeKind.STALE: NodeVerdict.DIFFERS}


def main() -> None:
    size = Size(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
    objects, before = cluster(size), cluster(size, _CHANGED)
    comparison = FleetComparison(objects)
    reading = comparing = 0.0
    compared = [it for it in nodes(size) if it.kind is not NodeKind.IPVS]
    for one in compared:
        rules = tables(one, before if one.kind is NodeKind.STALE else objects)
        texts = [SavedFile(family.value, saved(it)) for family, it in rules.items()]
        start = time.process_time()
        found = {it.ruleset.family: it.ruleset for it in read_saves(texts)}
        middle = time.process_time()
        result = comparison.compare(NodeTables(one.node, found, f"kube-proxy {one.form.value}"))
        end = time.process_time()
        assert result.verdict is _VERDICTS[one.kind], result
        reading, comparing = reading + middle - start, comparing + end - middle
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    per_node = 1000 / len(compared)
    print(
        f"{len(compared)} nodes, {size.services} Services with {size.endpoints} endpoints: read {reading * per_node:.0f} ms,"
        f" compare {comparing * per_node:.0f} ms a node; {reading + comparing:.0f} s in all, {megabytes:.0f} MB"
    )


if __name__ == "__main__":
    main()
