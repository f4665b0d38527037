"""Check tables of nftables on this node, for `check` and `status`."""

from collections.abc import Iterator

from pykubeproxy.inspect.check.firewalls import firewalls
from pykubeproxy.inspect.check.report import Check, Finding, Level
from pykubeproxy.inspect.node import Question, ReadError
from pykubeproxy.kernel import Backend, KernelError, nftables
from pykubeproxy.nodes.live import LiveNode

_QUESTION = Question(lazily=True, nftables=True, firewalls=True)


def live_firewalls(backend: Backend) -> Iterator[Finding]:
    """Check the tables of nftables on this node; no findings if there are none, or if they cannot be read."""
    try:
        if not nftables.native_tables():
            return
        (state,) = LiveNode(backend.value).nodes(_QUESTION)
    except (OSError, ReadError, KernelError):  # other findings say so
        return
    for remark in state.remarks:
        yield Check("firewall").skip(remark)
    for family, rules in state.rules.items():
        yield from firewalls(family, rules, state.network)


def firewall_warnings(backend: str) -> tuple[str, ...]:
    """Return which rules of nftables stop packets to Services; none if they cannot be read."""
    return tuple(one.message for one in live_firewalls(Backend(backend)) if one.level is Level.WARN)
