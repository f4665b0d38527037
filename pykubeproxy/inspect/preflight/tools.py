"""Rights, commands and kernel: whether rules can be written at all."""

from pykubeproxy.inspect.preflight.finding import Finding, fail, ok, several, skip, warn
from pykubeproxy.kernel.tools import Backend, Tools
from pykubeproxy.kernel.trial import Lack, Trial
from pykubeproxy.objects import Family

_NEEDED = ("CAP_NET_ADMIN", "CAP_NET_RAW")
# iptables-restore waits for the lock and takes --random-fully since then.
_OLDEST = (1, 6, 2)
# Before that nft lists rules otherwise than they were written (kubernetes#82361), and -C misses them.
_OLDEST_NFT = (1, 8, 4)


def privileges(capabilities: frozenset[str]) -> Finding:
    """Whether this process may change iptables, as the agent must."""
    missing = [name for name in _NEEDED if name not in capabilities]
    if missing:
        advice = f"Run this as root, or with {several(_NEEDED)}; the agent needs them too."
        return fail("privileges", f"this process lacks {several(missing)}", advice)
    return ok("privileges", f"{several(_NEEDED)} are in effect")


def version(tools: Tools) -> Finding:
    """Whether the commands of a backend are recent enough."""
    family = tools.family
    text = f"{tools.main} {_dotted(tools.version)}"
    if tools.version < _OLDEST:
        return fail("iptables", text, f"Install iptables {_dotted(_OLDEST)} or later.", family)
    if tools.backend is Backend.NFT and tools.version < _OLDEST_NFT:
        why = "Up to 1.8.3 the nft backend misreads rules of its own."
        return warn("iptables", text, f"{why} Install {_dotted(_OLDEST_NFT)} or later.", family)
    return ok("iptables", text, family)


def no_tools(reason: str, family: Family | None = None) -> Finding:
    """Commands that the agent needs are not there."""
    return fail("iptables", reason, "They have to be on the PATH of the agent.", family)


def unavailable(reason: str, family: Family, primary: bool) -> Finding:
    """The kernel cannot serve this family at all."""
    advice = "Load them with modprobe, or use a kernel that has them."
    if primary:
        return fail("kernel", reason, advice, family)
    return warn(
        "kernel", reason, f"{family.value} is left out. If that is not meant to be: {_small(advice)}", family
    )


def features(trial: Trial, family: Family) -> tuple[Finding, ...]:
    """What the rules use and this kernel, or this iptables, does not have."""
    findings = [_lack(lack, family) for lack in trial.lacking]
    if trial.alone:
        text = f"features could only be asked for, not tried: no network namespace ({trial.alone})"
        findings.append(skip("kernel", text, "With CAP_SYS_ADMIN they are tried.", family))
    elif not findings:
        findings.append(ok("kernel", "every feature that rules use was tried and works", family))
    return tuple(findings)


def features_unknown(reason: str, family: Family) -> Finding:
    """Neither tried nor asked for."""
    return skip("kernel", f"what the kernel can do is not known: {reason}", family=family)


def _lack(lack: Lack, family: Family) -> Finding:
    text = f"{lack.feature} cannot be used: {lack.reason}"
    load = f"Load {lack.modules or 'it'} with modprobe, or use a kernel and an iptables that have it"
    if lack.required:
        return fail("kernel", text, f"{load}; the agent does not start without.", family)
    return warn("kernel", text, f"The agent goes without it. {load}.", family)


def _small(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
