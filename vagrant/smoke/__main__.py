"""Test pykubeproxy on a cluster, with pods in a temporary namespace.

Two scenarios affect a cluster in use; leave them out with --skip: proxy-stopped removes the agent from one node for some
seconds, and client-address changes the externalTrafficPolicy of ingress-nginx temporarily.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from vagrant.smoke.cluster import Cluster, Failed, kubectl
from vagrant.smoke.scenarios import SCENARIOS, Scenario, Skipped


def main() -> int:
    """Return the exit status: 0 if no scenario failed."""
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(prog="python3 -m vagrant.smoke", description=__doc__)
    parser.add_argument("--kubeconfig", help="passed to kubectl")
    parser.add_argument("--context", help="passed to kubectl")
    parser.add_argument("--image", help="image with python3 for the pods (default: the agents' image)")
    parser.add_argument("--only", action="append", choices=names, help="run only this scenario; repeatable")
    parser.add_argument(
        "--skip", action="append", choices=names, default=[], help="skip this scenario; repeatable"
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="timeout of each step (default: %(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the pods")
    arguments = parser.parse_args()
    pairs = (("--kubeconfig", arguments.kubeconfig), ("--context", arguments.context))
    options = tuple(f"{name}={value}" for name, value in pairs if value)
    cluster = Cluster(kubectl(*options), options, arguments.seconds)
    chosen = [
        it for it in SCENARIOS if it.name in (arguments.only or names) and it.name not in arguments.skip
    ]
    try:
        cluster.deploy(arguments.image or cluster.image())
        return run(cluster, chosen)
    except Failed as failure:
        _say(f"FAIL  {failure}")
        return 1
    finally:
        if not arguments.keep:
            cluster.remove()


def run(cluster: Cluster, chosen: Sequence[Scenario]) -> int:
    """Run the scenarios; a failure does not stop the others. Return the exit status."""
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
    _say(f"{failed} of {len(chosen)} scenarios failed" if failed else "all scenarios passed")
    return 1 if failed else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
