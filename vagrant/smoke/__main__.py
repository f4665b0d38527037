"""Tries pykubeproxy on a cluster, with pods in a namespace of their own that goes away afterwards.

All scenarios are safe on a cluster in use, save proxy-stopped, which takes the agent off one node for some seconds, and
client-address, which changes the externalTrafficPolicy of ingress-nginx and changes it back: leave them out with --skip.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from vagrant.smoke.cluster import Cluster, Failed, kubectl
from vagrant.smoke.scenarios import SCENARIOS, Scenario, Skipped


def main() -> int:
    """The exit status: 0 if no scenario failed."""
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(prog="python3 -m vagrant.smoke", description=__doc__)
    parser.add_argument("--kubeconfig", help="as kubectl takes it")
    parser.add_argument("--context", help="as kubectl takes it")
    parser.add_argument(
        "--image", help="an image with python3 for the pods; that of the agents, unless given"
    )
    parser.add_argument(
        "--only", action="append", choices=names, help="this scenario; may stand several times"
    )
    parser.add_argument(
        "--skip", action="append", choices=names, default=[], help="all but this one; likewise"
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="how long anything may take (%(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the pods in place")
    given = parser.parse_args()
    pairs = (("--kubeconfig", given.kubeconfig), ("--context", given.context))
    options = tuple(f"{name}={value}" for name, value in pairs if value)
    cluster = Cluster(kubectl(*options), options, given.seconds)
    chosen = [it for it in SCENARIOS if it.name in (given.only or names) and it.name not in given.skip]
    try:
        cluster.deploy(given.image or cluster.image())
        return run(cluster, chosen)
    except Failed as failure:
        _say(f"FAIL  {failure}")
        return 1
    finally:
        if not given.keep:
            cluster.remove()


def run(cluster: Cluster, chosen: Sequence[Scenario]) -> int:
    """Go through the scenarios; one that fails does not stop the others."""
    failed = 0
    for scenario in chosen:
        started = time.monotonic()
        try:
            why = scenario.try_(cluster)
        except Skipped as skipped:
            _say(f"skip  {scenario.name}: {skipped}")
            continue
        except Failed as failure:
            why = str(failure)
        failed += bool(why)
        _say(
            f"{'FAIL' if why else 'ok  '}  {scenario.name}: {why or scenario.about}  ({time.monotonic() - started:.0f} s)"
        )
    _say(f"{failed} of {len(chosen)} scenarios failed" if failed else "all is well")
    return 1 if failed else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
