"""Check tables of nftables on this node: for `check` and `status`, and as a program of its own for the agent."""

import sys
from collections.abc import Iterator

import msgspec

from pykubeproxy.inspect.check.firewalls import StoppedTraffic, firewalls, stopped_traffic
from pykubeproxy.inspect.check.report import Check, Finding, Level
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.node import NodeState, Question, ReadError
from pykubeproxy.kernel import Backend, KernelError, nftables
from pykubeproxy.nodes.live import LiveNode

_QUESTION = Question(lazily=True, nftables=True, firewalls=True)


def live_firewalls(backend: Backend) -> Iterator[Finding]:
    """Check the tables of nftables on this node; no findings if there are none, or if they cannot be read."""
    try:
        if not nftables.native_tables():
            return
        state = _read(backend)
    except (OSError, ReadError, KernelError):  # other findings say so
        return
    for remark in state.remarks:
        yield Check("firewall").skip(remark)
    for family, rules in state.rules.items():
        yield from firewalls(family, rules, state.network)


def firewall_warnings(backend: str) -> tuple[str, ...]:
    """Return which rules of nftables stop packets to Services; none if they cannot be read."""
    return tuple(one.message for one in live_firewalls(Backend(backend)) if one.level is Level.WARN)


def _read(backend: Backend) -> NodeState:
    (state,) = LiveNode(backend.value).nodes(_QUESTION)
    return state


def main(backend: str) -> None:
    """Print a JSON object: by each rule that stops packets to Services, what is said about it. Raises SystemExit."""
    try:
        state = _read(Backend(backend))
        found: list[StoppedTraffic] = []
        for family, rules in state.rules.items():
            found += stopped_traffic(family, rules, state.network)
    except (OSError, ReadError, KernelError, TooManyRules) as error:
        raise SystemExit(str(error)) from None
    if state.remarks and not found:
        raise SystemExit("; ".join(state.remarks))
    messages = {one.rule: one.message for one in reversed(found)}  # IPv4 comes before IPv6
    sys.stdout.write(msgspec.json.encode(messages).decode())


if __name__ == "__main__":
    main(sys.argv[1])
