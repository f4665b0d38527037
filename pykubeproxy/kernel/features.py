"""What this kernel and this iptables can do, found out at start and without touching any table."""

import msgspec

from pykubeproxy.kernel.errors import Lacking, NotPermitted
from pykubeproxy.kernel.extensions import kernel_has
from pykubeproxy.kernel.iptables import Iptables
from pykubeproxy.kernel.tools import Backend
from pykubeproxy.objects import Family

# Each extension that the rules use, with the kernel module that has it.
_MATCHES = {
    "comment": "xt_comment",
    "conntrack": "xt_conntrack",
    "addrtype": "xt_addrtype",
    "mark": "xt_mark",
    "statistic": "xt_statistic",
    "recent": "xt_recent",
    "tcp": "xt_tcpudp",
    "udp": "xt_tcpudp",
}
_TARGETS = {"DNAT": "xt_nat", "MASQUERADE": "xt_MASQUERADE", "MARK": "xt_mark", "REJECT": "{ip}t_REJECT"}


class Features(msgspec.Struct, frozen=True):
    """What can be had of the things that rules can do without, and what is missing of those they cannot."""

    random_fully: bool
    """MASQUERADE --random-fully."""
    nfacct: bool
    """Rules that count into named counters."""
    sctp: bool
    """Rules for SCTP ports."""
    absent: tuple[str, ...] = ()
    """Required and not there: "kernel module xt_statistic", "iptables extension recent"."""

    def require(self) -> "Features":
        """These features, if nothing required is absent. Raises Lacking with what is, and what to do."""
        if self.absent:
            raise Lacking(
                self.absent, "load them with modprobe, or use a kernel and an iptables that have them"
            )
        return self


def probe(iptables: Iptables) -> Features:
    """Find out what can be done, in the network namespace of the calling thread.

    The kernel is asked for each extension; whether the tools know it too, their help text tells.
    Raises NotPermitted without CAP_NET_ADMIN.
    """
    try:
        lacking = [
            f"kernel module {module}" for module in _missing_modules(iptables.backend, iptables.family)
        ]
        nfacct = kernel_has(iptables.backend, iptables.family, "nfacct")
        sctp = kernel_has(iptables.backend, iptables.family, "sctp")
    except PermissionError as error:
        raise NotPermitted(
            "asking the kernel for the matches and targets it has", error.strerror or str(error)
        ) from error
    lacking += [f"iptables extension {name}" for name in _unknown_to_tools(iptables)]
    masquerade = _help(iptables, "-j", "MASQUERADE") or ""
    return Features(
        random_fully="--random-fully" in masquerade,
        nfacct=nfacct and _help(iptables, "-m", "nfacct") is not None,
        sctp=sctp and _help(iptables, "-m", "sctp") is not None,
        absent=tuple(dict.fromkeys(lacking)),
    )


def unavailable(backend: Backend, family: Family) -> str:
    """Why this family cannot be programmed on this kernel at all; "" if it can.

    Judged by the NAT target, the one thing that no service does without. Raises NotPermitted without
    CAP_NET_ADMIN.
    """
    try:
        if kernel_has(backend, family, "DNAT", target=True):
            return ""
    except PermissionError as error:
        raise NotPermitted(
            "asking the kernel for address translation", error.strerror or str(error)
        ) from error
    needs = "nft_compat and xt_nat" if backend is Backend.NFT else f"{_prefix(family)}_tables and xt_nat"
    return f"the kernel has no {family.value} NAT in the {backend.value} backend (modules {needs})"


def rule_modules(family: Family) -> tuple[str, ...]:
    """The kernel modules with the matches and targets that rules use."""
    return tuple(module.format(ip=_prefix(family)) for module in (*_MATCHES.values(), *_TARGETS.values()))


def _missing_modules(backend: Backend, family: Family) -> list[str]:
    matches = [module for name, module in _MATCHES.items() if not kernel_has(backend, family, name)]
    targets = [
        module for name, module in _TARGETS.items() if not kernel_has(backend, family, name, target=True)
    ]
    return [module.format(ip=_prefix(family)) for module in matches + targets]


def _unknown_to_tools(iptables: Iptables) -> list[str]:
    """The required extensions that the tools do not know; nearly always none, which one command tells."""
    if _help(iptables, *(word for name in _MATCHES for word in ("-m", name)), "-j", "DNAT") is not None:
        options = [("-j", name) for name in _TARGETS if name != "DNAT"]
    else:
        options = [("-m", name) for name in _MATCHES] + [("-j", name) for name in _TARGETS]
    return [name for option, name in options if _help(iptables, option, name) is None]


def _help(iptables: Iptables, *extensions: str) -> str | None:
    """The help text for some extensions, None if one is not known; printing it touches no table."""
    outcome = iptables.runner.run((iptables.tools.main, *extensions, "-h"), seconds=10)
    return outcome.stdout if outcome.exit_code == 0 else None


def _prefix(family: Family) -> str:
    return "ip" if family is Family.IPV4 else "ip6"
