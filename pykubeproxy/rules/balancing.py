"""The chains that pick a backend and the ones that send a packet there."""

from collections.abc import Iterator

from pykubeproxy.rules import names
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.text import host, probability
from pykubeproxy.services.backends import Backend
from pykubeproxy.services.ports import ServicePort

# Every bit of the client's address counts for affinity.
_AFFINITY_MASK = {False: "255.255.255.255", True: "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}


def balance(port: ServicePort, backends: tuple[Backend, ...], options: RuleOptions) -> Iterator[str]:
    """The rules that send each new connection to one of the backends, all with the same probability.

    A client with affinity goes where it was last time, as long as that was within `affinity_seconds`. After that, rule
    i of n takes 1/(n-i) of what is left, and the last one all of it.
    """
    targets = [(backend, names.endpoint_chain(port.name, backend.target)) for backend in backends]
    remarks = [
        "" if options.large_cluster else f'-m comment --comment "{port.name} -> {b.target}" '
        for b in backends
    ]
    if port.affinity_seconds is not None:
        known = f"-m recent --rcheck --seconds {port.affinity_seconds} --reap --name"
        for (_, chain), remark in zip(targets, remarks, strict=True):
            yield f"{remark}{known} {chain} --mask {_AFFINITY_MASK[options.ipv6]} --rsource -j {chain}"
    for i, ((_, chain), remark) in enumerate(zip(targets, remarks, strict=True)):
        left = len(targets) - i
        share = f"-m statistic --mode random --probability {probability(left)} " if left > 1 else ""
        yield f"{remark}{share}-j {chain}"


def endpoint_rules(port: ServicePort, backend: Backend, chain: str, options: RuleOptions) -> tuple[str, str]:
    """The rules of one backend's chain.

    A backend that reaches itself through the service is masqueraded, for it would take the answer to its own packet
    for a stranger's (hairpin). Everything else is sent on, and remembered if the service has affinity.
    """
    remark = "" if options.large_cluster else f'-m comment --comment "{port.name}" '
    remember = ""
    if port.affinity_seconds is not None:
        remember = f"-m recent --set --name {chain} --mask {_AFFINITY_MASK[options.ipv6]} --rsource "
    protocol = port.protocol.value.lower()
    return (
        f"-s {host(backend.endpoint.address)} {remark}-j {names.MARK_MASQ}",
        f"-p {protocol} {remark}{remember}-m {protocol} -j DNAT --to-destination {backend.target}",
    )
