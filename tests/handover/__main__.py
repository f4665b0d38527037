"""Open a million connections to a node whose service proxy is handed over in every way; none may fail."""

import argparse
import random
import sys
from pathlib import Path

from pykubeproxy.kernel import Backend
from tests.handover import handovers
from tests.handover.handovers import RealKubeProxy, StandIn
from tests.handover.proof import Plan, prove

_BY_NAME = {item.__name__.replace("_", "-"): item for item in (*handovers.ALL, handovers.nothing)}
_SHOWN = 20


def main() -> int:
    """Begin with one backend after the other and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.handover", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, help="repeat the run with this seed")
    add("--connections", type=int, default=1_000_000, help="how many to open (default: %(default)s)")
    add("--rate", type=float, default=2000, help="the most connections a second (default: %(default)s)")
    add("--backend", choices=[item.value for item in Backend], help="begin with this backend only")
    add("--only", choices=_BY_NAME, action="append", help="only this hand-over; nothing is a control run")
    add("--no-changes", action="store_true", help="leave Services and endpoints as they are")
    add("--kube-proxy", type=Path, help="a kube-proxy binary to use instead of a stand-in")
    add("--captures", type=Path, default=Path("build"), help="folder for captures (default: %(default)s)")
    given = parser.parse_args()
    backends = [Backend(given.backend)] if given.backend else list(Backend)
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    failures = []
    for backend in backends:
        plan = Plan(
            backend,
            seed,
            given.connections // len(backends),
            given.rate,
            [_BY_NAME[name] for name in given.only] if given.only else handovers.ALL,
            RealKubeProxy(given.kube_proxy) if given.kube_proxy else StandIn(),
            given.captures,
            not given.no_changes,
        )
        failures += prove(plan).failures
    for failure in failures[:_SHOWN]:
        print(f"FAIL: {failure}", file=sys.stderr)
    print("handover: failed" if failures else "handover: passed")
    return 1 if failures else 0


sys.exit(main())
