"""Checks of a node's kube-proxy that need only its pod and its rules, so that they work from another machine."""

import re
from collections.abc import Iterable, Iterator

from pykubeproxy.inspect.check.report import Check, Finding
from pykubeproxy.objects import Family
from pykubeproxy.objects.pods import Container, Pod
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.iptables_save import parse_target
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.skeleton import IPVS_CHAINS
from pykubeproxy.wording import counted, listed

_MINOR = re.compile(r"v?1\.(\d+)\b")
# How many minor versions kube-proxy may be older than the API server (Kubernetes version skew policy).
_MAX_SKEW = 3
_RESTARTS = 5
# The jumps without which connections to Services fail: nat translates, filter rejects and accepts.
_JUMPS = (
    (ChainKey("nat", "PREROUTING"), names.SERVICES),
    (ChainKey("nat", "OUTPUT"), names.SERVICES),
    (ChainKey("nat", "POSTROUTING"), names.POSTROUTING),
    (ChainKey("filter", "FORWARD"), names.FORWARD),
)


def pod(title: str, found: Pod, container: Container) -> Finding:
    """Check the pod of a proxy: `title` is such as "kube-proxy v1.35.1"."""
    check, name = Check("pod"), f"pod {found} of {title}"
    logs = f"Run `kubectl logs -n {found.namespace} {found.name}`"
    problem = container.problem or found.reason
    reason = f": {problem}" if problem else ""
    phase = "being deleted" if found.deleting else found.phase
    if phase != "Running":
        return check.fail(f"{name} is {phase}{reason}", f"{logs}, and `kubectl describe`.")
    if not container.ready:
        return check.fail(f"{name} is not ready{reason}", f"{logs}.")
    if container.restarts >= _RESTARTS:
        return check.warn(f"{title} has restarted {container.restarts} times", f"{logs} with --previous.")
    return check.ok(f"{title} runs in pod {found} and is ready")


def no_pod(reason: str) -> Finding:
    """Report a node without a pod of a proxy, whose rules could not be read."""
    return Check("pod").fail(reason, "")


def other_mode(reason: str) -> Finding:
    """Report a proxy that writes no iptables rules, so that there is nothing to check."""
    return Check("mode").skip(
        f"the node {reason}", "Its rules are not checked: they are not those of iptables mode."
    )


def unread(reason: str, family: Family | None = None) -> Finding:
    """Report rules that could not be read, of one family or of all."""
    return Check("tables", family).skip(f"the rules could not be read: {reason}")


def version(proxy: str, server: str) -> Finding:
    """Check that the versions of a kube-proxy and of the API server fit together."""
    check = Check("version")
    of_proxy, of_server = _MINOR.match(proxy), _MINOR.match(server)
    if not of_proxy or not of_server:
        return check.skip(f"the versions are unknown: kube-proxy {proxy or '?'}, API server {server or '?'}")
    skew = int(of_server[1]) - int(of_proxy[1])
    message = f"kube-proxy is {proxy}, the API server {server}"
    if skew < 0:
        return check.warn(message, "kube-proxy must not be newer than the API server. Upgrade that first.")
    if skew > _MAX_SKEW:
        return check.warn(message, f"kube-proxy may be {_MAX_SKEW} minor versions older. Upgrade it.")
    return check.ok(message)


def tables(rulesets: Iterable[Ruleset], backend: str, other: str) -> Iterator[Finding]:
    """Check the rules of a node in the backend in use; `other` is the other backend if it has such rules too."""
    for ruleset in rulesets:
        owned = sum(map(is_ours, ruleset.chains))
        message = f"{backend} is used, with {counted(owned, 'chain')} of a service proxy"
        yield Check("tables", ruleset.family).ok(message)
        yield _jumps(ruleset)
        if left := sorted({key.chain for key in ruleset.chains if key in IPVS_CHAINS}):
            yield Check("leftovers", ruleset.family).warn(
                f"chains of a kube-proxy in ipvs mode are left ({listed(left, 4)})",
                "They do no harm without IPVS. Run `kube-proxy --cleanup` on the node, or restart it.",
            )
    if other:
        yield Check("other-tables").fail(
            f"the {other} tables, which are not in use, have chains of a service proxy too",
            "Packets pass both, so old rules may answer. Drain and restart the node, or run `kube-proxy --cleanup` there.",
        )
    else:
        yield Check("other-tables").ok("only one backend has rules of a service proxy")


def _jumps(ruleset: Ruleset) -> Finding:
    check = Check("jumps", ruleset.family)
    missing = [
        f"{key.table} {key.chain} to {target}"
        for key, target in _JUMPS
        if target not in map(parse_target, ruleset.chains.get(key, ()))
    ]
    if missing:
        advice = "Restart kube-proxy, and find the program that changes its rules."
        return check.fail(f"packets do not reach its chains: no jump from {listed(missing)}", advice)
    if skeleton.NAT_SERVICES not in ruleset.chains:
        return check.fail("chain KUBE-SERVICES of table nat is missing", "Restart kube-proxy.")
    return check.ok("the built-in chains jump to those of the proxy")
