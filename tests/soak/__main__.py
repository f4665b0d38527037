"""`python -m tests.soak`: churn, faults and traffic together for some minutes, chosen at random from a printed seed."""

import argparse
import sys

from tests.soak.soak import new_seed, report, soak


def main() -> int:
    """One backend after the other; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seed", type=int, help="do again what was done with it")
    parser.add_argument("--minutes", type=float, default=2.0, help="for each backend (default 2)")
    parser.add_argument("--backend", choices=["nft", "legacy"], action="append", help="only this one")
    given = parser.parse_args()
    seed = new_seed() if given.seed is None else given.seed
    backends = given.backend or ["nft", "legacy"]
    return report([it for backend in backends for it in soak(backend, seed, given.minutes * 60)])


sys.exit(main())
