"""Checks of the API server: it answers, has this node, and grants the proxy's permissions."""

from pykubeproxy.inspect.preflight.report import Check, Finding
from pykubeproxy.sources.access import EVENTS, Access
from pykubeproxy.wording import listed

_API, _NODE, _RIGHTS = Check("api-server"), Check("node"), Check("permissions")


def cluster(access: Access, node_name: str) -> tuple[Finding, ...]:
    """Return the findings about an API server."""
    return _answer(access), _node(access, node_name), _permissions(access)


def unusable(reason: str) -> tuple[Finding, ...]:
    """Return the findings if the configured API server cannot be used."""
    advice = "Check --kubeconfig and --master, or the file of --config."
    return (_API.fail(reason, advice), *_skipped("no usable API server is configured"))


def not_configured() -> tuple[Finding, ...]:
    """Return the findings if no API server is configured and this is no pod."""
    reason = "no API server is configured"
    advice = "Pass the agent's --kubeconfig or --config to check it."
    return (_API.skip(reason, advice), *_skipped(reason))


def _skipped(reason: str) -> tuple[Finding, ...]:
    return _NODE.skip(reason), _RIGHTS.skip(reason)


def _answer(access: Access) -> Finding:
    if access.node_error and access.review_error:
        return _API.fail(access.node_error, f"Try it from this node: curl -k {access.server}/livez")
    return _API.ok(f"{access.server} answers")


def _node(access: Access, node_name: str) -> Finding:
    if access.node_error:
        return _NODE.skip(f"cannot look up Node {node_name}")
    if not access.node:
        advice = "Set the name the cluster uses with --hostname-override; kubectl get nodes lists the names."
        return _NODE.fail(f"the cluster has no Node {node_name}", advice)
    return _NODE.ok(f"the cluster has a Node {node_name}")


def _permissions(access: Access) -> Finding:
    if access.review_error:
        return _RIGHTS.skip(f"unknown: {access.review_error}")
    needed = [str(right) for right in access.denied if right != EVENTS]
    if needed:
        advice = "Bind the account to the ClusterRole system:node-proxier, or grant these permissions."
        return _RIGHTS.fail(f"not granted: {listed(needed, 6)}", advice)
    if EVENTS in access.denied:
        advice = (
            "The proxy works, but its events are lost. Grant the permission, as system:node-proxier does."
        )
        return _RIGHTS.warn(f"not granted: {EVENTS}.{EVENTS.group}", advice)
    return _RIGHTS.ok("the proxy has all permissions")
