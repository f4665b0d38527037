"""Checks of privileges, iptables and kernel: whether rules can be written at all."""

from pykubeproxy.inspect.preflight.model import Finding, fail, ok, skip, warn
from pykubeproxy.kernel.tools import Backend, Tools
from pykubeproxy.kernel.trial import MissingFeature, Trial
from pykubeproxy.objects import Family
from pykubeproxy.wording import listed

_CAPABILITIES = ("CAP_NET_ADMIN", "CAP_NET_RAW")
# The first with --random-fully, whose iptables-restore waits for the lock.
_OLDEST = (1, 6, 2)
# Older ones list rules in another form than they were written (kubernetes#82361), so -C does not find them.
_OLDEST_NFT = (1, 8, 4)


def privileges(capabilities: frozenset[str]) -> Finding:
    """Check that this process, and so the agent, may change iptables."""
    missing = [name for name in _CAPABILITIES if name not in capabilities]
    if missing:
        advice = f"Run this as root, or with {listed(_CAPABILITIES)}; the agent needs them too."
        return fail("privileges", f"this process lacks {listed(missing)}", advice)
    return ok("privileges", f"{listed(_CAPABILITIES)} are in effect")


def version(tools: Tools) -> Finding:
    """Check that a backend's commands are recent enough."""
    family = tools.family
    message = f"{tools.main} {_dotted(tools.version)}"
    if tools.version < _OLDEST:
        return fail("iptables", message, f"Install iptables {_dotted(_OLDEST)} or later.", family)
    if tools.backend is Backend.NFT and tools.version < _OLDEST_NFT:
        reason = "Up to 1.8.3 the nft backend misreads its own rules."
        return warn("iptables", message, f"{reason} Install {_dotted(_OLDEST_NFT)} or later.", family)
    return ok("iptables", message, family)


def no_tools(reason: str, family: Family | None = None) -> Finding:
    """Report commands that are missing."""
    return fail("iptables", reason, "Install them on the PATH of the agent.", family)


def unavailable(reason: str, family: Family, primary: bool) -> Finding:
    """Report that the kernel cannot serve a family."""
    advice = "Load them with modprobe, or use a kernel that has them."
    if primary:
        return fail("kernel", reason, advice, family)
    return warn("kernel", reason, f"{advice} Until then {family.value} is not served.", family)


def features(trial: Trial, family: Family) -> tuple[Finding, ...]:
    """Check that kernel and iptables have the features that rules use."""
    findings = [_lack(lack, family) for lack in trial.missing]
    if trial.untested:
        message = f"features were looked up, not tried: no network namespace ({trial.untested})"
        findings.append(skip("kernel", message, "With CAP_SYS_ADMIN they are tried.", family))
    elif not findings:
        findings.append(ok("kernel", "every feature that rules use was tried and works", family))
    return tuple(findings)


def features_unknown(reason: str, family: Family) -> Finding:
    """Report that features could be neither tried nor looked up."""
    return skip("kernel", f"the kernel's features are unknown: {reason}", family=family)


def _lack(lack: MissingFeature, family: Family) -> Finding:
    message = f"{lack.name} cannot be used: {lack.reason}"
    load = f"Load {lack.modules or 'it'} with modprobe, or use a kernel and an iptables that have it"
    if lack.required:
        return fail("kernel", message, f"{load}; the agent does not start without it.", family)
    return warn("kernel", message, f"The agent runs without it. {load}.", family)


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
