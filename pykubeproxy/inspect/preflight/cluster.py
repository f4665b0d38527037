"""The API server: whether it answers, knows this node, and grants what a proxy needs."""

from pykubeproxy.inspect.preflight.finding import Finding, fail, ok, several, skip, warn
from pykubeproxy.sources.access import EVENTS, Access

API, NODE, RIGHTS = "api-server", "node", "permissions"


def cluster(access: Access, node_name: str) -> tuple[Finding, ...]:
    """What an API server said, in three findings."""
    return _answer(access), _node(access, node_name), _rights(access)


def unusable(reason: str) -> tuple[Finding, ...]:
    """Whatever was said of an API server leads to none."""
    advice = "See to --kubeconfig and --master, or to the file of --config."
    return (fail(API, reason, advice), *_not_asked("there is no API server to ask"))


def not_configured() -> tuple[Finding, ...]:
    """No API server was named, and this is no pod."""
    reason = "no API server is configured"
    advice = "Give --kubeconfig or --config, as to the agent, to have it checked."
    return (skip(API, reason, advice), *_not_asked(reason))


def _not_asked(reason: str) -> tuple[Finding, ...]:
    return skip(NODE, reason), skip(RIGHTS, reason)


def _answer(access: Access) -> Finding:
    if access.trouble and access.unknown:
        return fail(API, access.trouble, f"Try it from this node: curl -k {access.server}/livez")
    return ok(API, f"{access.server} answers")


def _node(access: Access, node_name: str) -> Finding:
    if access.trouble:
        return skip(NODE, f"Node {node_name} could not be looked for")
    if not access.node:
        advice = "Name it as the cluster does with --hostname-override; kubectl get nodes lists the names."
        return fail(NODE, f"the cluster has no Node {node_name}", advice)
    return ok(NODE, f"the cluster has a Node {node_name}")


def _rights(access: Access) -> Finding:
    if access.unknown:
        return skip(RIGHTS, f"not known: {access.unknown}")
    needed = [str(right) for right in access.denied if right != EVENTS]
    if needed:
        advice = "Bind the account to the ClusterRole system:node-proxier, or grant these."
        return fail(RIGHTS, f"not granted: {several(needed, 6)}", advice)
    if EVENTS in access.denied:
        advice = "The proxy works, but its events are lost: grant it, as system:node-proxier does."
        return warn(RIGHTS, f"not granted: {EVENTS}.{EVENTS.group}", advice)
    return ok(RIGHTS, "all that the proxy needs is granted")
