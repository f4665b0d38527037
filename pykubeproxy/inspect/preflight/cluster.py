"""Checks of the API server: it answers, has this node, and grants the proxy's permissions.

Another pod than the agent's has another account, and may have another address of the API server. A problem there says
nothing about the agent, so the check is skipped.
"""

from typing import TYPE_CHECKING

from pykubeproxy.inspect.preflight.report import Check, Finding
from pykubeproxy.wording import listed

# Most of it is the client of the API server, which the caller imports only if it asks one.
if TYPE_CHECKING:
    from pykubeproxy.sources.access import Access

_API, _NODE, _RIGHTS = Check("api-server"), Check("node"), Check("permissions")
_IN_ITS_POD = "Once the agent runs, run `pykubeproxy check` in its pod."


def cluster(access: "Access", node_name: str, as_agent: bool = True) -> tuple[Finding, ...]:
    """Return the findings about an API server; `as_agent`: the agent uses this address and account."""
    return _answer(access, as_agent), _node(access, node_name, as_agent), _permissions(access, as_agent)


def unusable(reason: str, as_agent: bool = True) -> tuple[Finding, ...]:
    """Return the findings if the settings for the API server cannot be used."""
    if not as_agent:
        return (_API.skip(reason, _IN_ITS_POD), *_skipped("no usable API server is configured here"))
    advice = "Check --kubeconfig and --master, or the file of --config."
    return (_API.fail(reason, advice), *_skipped("no usable API server is configured"))


def not_configured() -> tuple[Finding, ...]:
    """Return the findings if no API server is configured and this is no pod."""
    reason = "no API server is configured"
    advice = f"Pass the agent's --kubeconfig or --config to check it. {_IN_ITS_POD}"
    return (_API.skip(reason, advice), *_skipped(reason))


def _skipped(reason: str) -> tuple[Finding, ...]:
    return _NODE.skip(reason), _RIGHTS.skip(reason)


def _answer(access: "Access", as_agent: bool) -> Finding:
    if access.answers and access.verified:
        return _API.ok(f"{access.server} answers")
    if access.answers:
        advice = (
            "A machine in between can read the credentials and change the rules. In the kubeconfig, set"
            " certificate-authority instead of insecure-skip-tls-verify."
        )
        return _API.warn(f"{access.server} answers, but its certificate is not verified", advice)
    if not as_agent:
        return _API.skip(access.node_error, f"The agent may use another address. {_IN_ITS_POD}")
    return _API.fail(access.node_error, f"Try it from this node: curl -k {access.server}/livez")


def _node(access: "Access", node_name: str, as_agent: bool) -> Finding:
    if access.node_error:
        return _NODE.skip(f"cannot look up Node {node_name}")
    if access.node:
        return _NODE.ok(f"the cluster has a Node {node_name}")
    message = f"the cluster has no Node {node_name}"
    if not as_agent:
        return _NODE.skip(message, "This pod may have another host name. Pass --hostname-override.")
    advice = "Set the name the cluster uses with --hostname-override; kubectl get nodes lists the names."
    return _NODE.fail(message, advice)


def _permissions(access: "Access", as_agent: bool) -> Finding:
    from pykubeproxy.sources.access import EVENTS

    if access.review_error:
        return _RIGHTS.skip(f"unknown: {access.review_error}")
    if not as_agent:
        lacking = f"lacks {listed(map(str, access.denied), 6)}" if access.denied else "has all permissions"
        return _RIGHTS.skip(f"this pod's account, which is not the agent's, {lacking}", _IN_ITS_POD)
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
