"""Run changes, faults and traffic together for some minutes, at random from a printed seed."""

import argparse
import sys

from tests.soak.soak import new_seed, report, soak


def main() -> int:
    """Run one backend after the other and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat the run with this seed")
    parser.add_argument("--minutes", type=float, default=2.0, help="minutes for each backend (default: 2)")
    parser.add_argument("--backend", choices=["nft", "legacy"], action="append", help="run only this backend")
    given = parser.parse_args()
    seed = new_seed() if given.seed is None else given.seed
    backends = given.backend or ["nft", "legacy"]
    return report([item for backend in backends for item in soak(backend, seed, given.minutes * 60)])


sys.exit(main())
