"""Find out which features this kernel and this iptables have, and load the kernel modules that rules need.

`probe_features` asks the kernel for each match and target, as iptables does when it loads an extension. Such a request
changes no table, needs CAP_NET_ADMIN only, makes the kernel load a missing module, and works on the network namespace of
the calling thread. `try_features` writes a rule for each feature into a temporary network namespace.
"""

import contextlib
import errno
import os
import platform
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from pykubeproxy.kernel import netlink, nfacct
from pykubeproxy.kernel.errors import KernelError, Missing, NotPermitted, Rejected, UnsupportedFamily
from pykubeproxy.kernel.iptables import Backend, Iptables, find_tools
from pykubeproxy.kernel.legacy import get_xtables_option
from pykubeproxy.kernel.netlink import ADDRESS_FAMILY
from pykubeproxy.kernel.runner import Runner
from pykubeproxy.kernel.system import SettingError, read_setting, run_in_new_namespace
from pykubeproxy.objects import Family

# The extensions that rules use, with their kernel modules.
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
_OPTIONAL = ("nfacct", "sctp")
_TABLES = ("filter", "nat", "mangle")
_MODPROBE_SECONDS = 30

# The revisions of matches and targets so far; any of them suffices.
_REVISIONS = range(5)

# nft_compat: linux/netfilter/nf_tables_compat.h
_COMPAT_GET = 11 << 8
_NAME, _REVISION, _TYPE = 1, 2, 3

# xtables: struct xt_get_revision is the name in 29 bytes and the revision; options as in ip_tables.h
_XT_REVISION = struct.Struct("29sB")
_XT_MATCH = {Family.IPV4: 66, Family.IPV6: 68}
_XT_TARGET = {Family.IPV4: 67, Family.IPV6: 69}

# The errors of the kernel for an unknown revision, extension or family.
_UNSUPPORTED = {errno.EPROTONOSUPPORT, errno.ENOENT, errno.ENOPROTOOPT, errno.EINVAL}
_UNSUPPORTED |= {errno.EOPNOTSUPP, errno.EAFNOSUPPORT}
_COUNTER = "pykubeproxy_trial"
_DESTINATION = {Family.IPV4: "192.0.2.1:80", Family.IPV6: "[2001:db8::1]:80"}


class Features(msgspec.Struct, frozen=True):
    """The optional features that are available, and the required ones that are not."""

    random_fully: bool
    """MASQUERADE --random-fully."""
    nfacct: bool
    """Rules that count into named counters."""
    sctp: bool
    """Rules for SCTP ports."""
    absent: tuple[str, ...] = ()
    """Missing requirements: "kernel module xt_statistic", "iptables extension recent"."""

    def require(self) -> "Features":
        """Return these features. Raises UnsupportedFamily if a required one is missing."""
        if self.absent:
            advice = "load them with modprobe, or use a kernel and an iptables that have them"
            raise UnsupportedFamily(f"this node lacks {', '.join(self.absent)}; {advice}")
        return self


def probe_features(iptables: Iptables) -> Features:
    """Return the features that both kernel and iptables have. Changes no table. Raises NotPermitted, KernelError."""
    backend, family = iptables.backend, iptables.family
    missing = [f"kernel module {module}" for module in _missing_modules(backend, family)]
    optional = [name for name in _OPTIONAL if kernel_has(backend, family, name)]
    texts = _help_texts(iptables, (*_MATCHES, *optional))
    missing += [f"iptables extension {name}" for name in (*_MATCHES, *_TARGETS) if name not in texts]
    return Features(
        random_fully="--random-fully" in texts.get("MASQUERADE", ""),
        nfacct="nfacct" in texts,
        sctp="sctp" in texts,
        absent=tuple(dict.fromkeys(missing)),
    )


def unsupported_reason(backend: Backend, family: Family, runner: Runner | None = None) -> str:
    """Return why this node cannot serve a family at all, "" if it can. Raises NotPermitted."""
    if family is Family.IPV6 and (disabled := ipv6_disabled()):
        return disabled
    try:
        find_tools(backend, family, runner or Runner())
    except Missing as error:
        return str(error)
    if has_nat(backend, family):
        return ""
    needs = "nft_compat and xt_nat" if backend is Backend.NFT else f"{_prefix(family)}_tables and xt_nat"
    return f"the kernel has no {family.value} NAT in the {backend.value} backend (modules {needs})"


def has_nat(backend: Backend, family: Family) -> bool:
    """Return whether the kernel has the target DNAT, which every service needs. Raises NotPermitted."""
    return kernel_has(backend, family, "DNAT", target=True)


def ipv6_disabled(root: Path = Path("/")) -> str:
    """Return why the network namespace of the calling thread has no IPv6, "" if it has."""
    if not (root / "proc/thread-self/net/if_inet6").exists():
        return "the kernel has no IPv6: the module ipv6 is missing, or ipv6.disable=1 was set at boot"
    with contextlib.suppress(SettingError):
        if read_setting("net/ipv6/conf/all/disable_ipv6", root / "proc/sys") == "1":
            return "IPv6 is disabled (net.ipv6.conf.all.disable_ipv6 = 1)"
    return ""


def required_modules(backend: Backend) -> tuple[str, ...]:
    """Return the kernel modules that rules of both families may need."""
    prefixes = tuple(map(_prefix, Family))
    if backend is Backend.NFT:
        base: tuple[str, ...] = ("nf_tables", "nft_compat", "nft_chain_nat")
    else:
        base = tuple(f"{ip}_tables" for ip in prefixes)
        base += tuple(f"{ip}table_{table}" for ip in prefixes for table in _TABLES)
    modules = (*_MATCHES.values(), *_TARGETS.values())
    extensions = (module.format(ip=ip) for ip in prefixes for module in modules)
    return (*base, "nf_conntrack", *dict.fromkeys(extensions))


def load_modules(backend: Backend, runner: Runner | None = None, root: Path = Path("/")) -> None:
    """Load the modules of a backend with modprobe, as far as possible; `probe_features` reports those still missing.

    The kernel loads most modules on demand, but not the legacy tables, and some nodes have no modprobe for it. Without
    modprobe or modules for this kernel, do nothing.
    """
    runner = runner or Runner()
    if runner.has("modprobe") and (root / "lib/modules" / platform.release()).is_dir():
        with contextlib.suppress(KernelError):
            # --all: load the others even if one is missing, or built in.
            runner.run(("modprobe", "--all", *required_modules(backend)), seconds=_MODPROBE_SECONDS)


def _missing_modules(backend: Backend, family: Family) -> list[str]:
    return [
        module.format(ip=_prefix(family))
        for extensions, target in ((_MATCHES, False), (_TARGETS, True))
        for name, module in extensions.items()
        if not kernel_has(backend, family, name, target=target)
    ]


def _help_texts(iptables: Iptables, matches: Collection[str]) -> dict[str, str]:
    """Return help texts by name, for those of these matches and of the targets in rules that iptables has.

    One command asks for all matches and DNAT together; if iptables lacks one of them, ask for each on its own.
    """
    options = {name: ("-m", name) for name in matches} | {name: ("-j", name) for name in _TARGETS}
    together = [*matches, "DNAT"]
    text = _help(iptables, *(word for name in together for word in options[name]))
    found = {} if text is None else dict.fromkeys(together, text)
    texts = {name: _help(iptables, *options[name]) for name in options if name not in found}
    return found | {name: text for name, text in texts.items() if text is not None}


def _help(iptables: Iptables, *extensions: str) -> str | None:
    """Return the help text of some extensions, None if iptables lacks one. Changes no table."""
    outcome = iptables.runner.run((iptables.tools.main, *extensions, "-h"), seconds=10)
    return outcome.stdout if outcome.exit_code == 0 else None


def _prefix(family: Family) -> str:
    return "ip" if family is Family.IPV4 else "ip6"


def kernel_has(backend: Backend, family: Family, name: str, *, target: bool = False) -> bool:
    """Return whether the kernel has a match (or target) in any revision. Raises NotPermitted."""
    request = _request_nft if backend is Backend.NFT else _request_legacy
    for revision in _REVISIONS:
        try:
            request(family, name, revision, target)
        except PermissionError as error:
            reason = error.strerror or str(error)
            raise NotPermitted(f"cannot ask the kernel whether it has {name}", reason) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        else:
            return True
    return False


def _request_nft(family: Family, name: str, revision: int, target: bool) -> None:
    body = netlink.string_attribute(_NAME, name)
    body += netlink.attribute(_REVISION, struct.pack(">I", revision))
    body += netlink.attribute(_TYPE, struct.pack(">I", target))
    netlink.netfilter_request(_COMPAT_GET, 0, ADDRESS_FAMILY[family], body)


def _request_legacy(family: Family, name: str, revision: int, target: bool) -> None:
    option = (_XT_TARGET if target else _XT_MATCH)[family]
    get_xtables_option(family, option, _XT_REVISION.pack(name.encode(), revision))


class Feature(msgspec.Struct, frozen=True):
    """A feature that rules use, its kernel modules, and a test rule, in which {to} stands for an address and port."""

    name: str
    modules: str
    rule: str
    table: str = "nat"
    required: bool = True


FEATURES = (
    Feature("address translation (DNAT)", "xt_nat", "-p tcp -m tcp --dport 80 -j DNAT --to-destination {to}"),
    Feature("MASQUERADE", "xt_MASQUERADE", "-j MASQUERADE"),
    Feature("MARK", "xt_mark", "-j MARK --set-xmark 0x4000/0x4000"),
    Feature("match mark", "xt_mark", "-m mark --mark 0x4000/0x4000 -j RETURN"),
    Feature("match comment", "xt_comment", "-m comment --comment trial -j RETURN"),
    Feature("match addrtype", "xt_addrtype", "-m addrtype --dst-type LOCAL -j RETURN"),
    Feature("match statistic", "xt_statistic", "-m statistic --mode random --probability 0.5 -j RETURN"),
    Feature("match recent", "xt_recent", "-m recent --name trial --rcheck --seconds 10 --reap -j RETURN"),
    Feature("match udp", "xt_tcpudp", "-p udp -m udp --dport 53 -j RETURN"),
    Feature("match conntrack", "xt_conntrack", "-m conntrack --ctstate NEW -j RETURN", "filter"),
    Feature("REJECT", "ipt_REJECT and ip6t_REJECT", "-j REJECT", "filter"),
    Feature("MASQUERADE --random-fully", "xt_MASQUERADE", "-j MASQUERADE --random-fully", required=False),
    Feature("match sctp", "xt_sctp", "-p sctp -m sctp --dport 80 -j RETURN", required=False),
    Feature(
        "match nfacct",
        "xt_nfacct and nfnetlink_acct",
        f"-m nfacct --nfacct-name {_COUNTER} -j RETURN",
        "filter",
        required=False,
    ),
)


class MissingFeature(msgspec.Struct, frozen=True):
    """A feature that does not work, and what iptables or the kernel reported."""

    name: str
    modules: str
    reason: str
    required: bool


class Trial(msgspec.Struct, frozen=True):
    """The missing features. `untested` is why they were only probed, "" if rules with them were written."""

    missing: tuple[MissingFeature, ...]
    untested: str = ""


def try_features(iptables: Iptables) -> Trial:
    """Write a rule for each feature into a network namespace that is removed afterwards.

    Without permission to create one, probe kernel and tools instead. Raises KernelError, and NotPermitted without
    CAP_NET_ADMIN.
    """
    # The xtables lock is for the node's tables: do not wait for it or create its file.
    runner = Runner((), {**iptables.runner.environment, "XTABLES_LOCKFILE": os.devnull})
    isolated = msgspec.structs.replace(iptables, runner=runner)
    try:
        return run_in_new_namespace(lambda: Trial(tuple(_test(isolated))))
    except NotPermitted as error:
        return _probe(iptables, error.message)


def _test(iptables: Iptables) -> Iterator[MissingFeature]:
    no_counter = nfacct.ensure(_COUNTER)
    try:
        iptables.restore("".join(_restore_input(feature, iptables.family) for feature in FEATURES))
    except NotPermitted:
        raise
    except KernelError:
        # One restore usually suffices; if it fails, find out which features are missing.
        for feature in FEATURES:
            if failure := _failure(iptables, feature):
                reason = no_counter or failure if _COUNTER in feature.rule else failure
                yield MissingFeature(feature.name, feature.modules, reason, feature.required)


def _failure(iptables: Iptables, feature: Feature) -> str:
    """Return why a rule with this feature cannot be written, "" if it can."""
    try:
        iptables.restore(_restore_input(feature, iptables.family))
    except Rejected as error:
        return error.message
    except KernelError as error:
        return str(error)
    return ""


def _restore_input(feature: Feature, family: Family) -> str:
    rule = feature.rule.format(to=_DESTINATION[family])
    chain = "POSTROUTING" if "MASQUERADE" in rule else "PREROUTING" if feature.table == "nat" else "INPUT"
    return f"*{feature.table}\n-A {chain} {rule}\nCOMMIT\n"


def _probe(iptables: Iptables, untested: str) -> Trial:
    features = probe_features(iptables)
    optional = {
        "MASQUERADE --random-fully": features.random_fully,
        "match sctp": features.sctp,
        "match nfacct": features.nfacct,
    }
    required = dict.fromkeys(features.absent, True)
    missing = required | {name: False for name, available in optional.items() if not available}
    return Trial(
        tuple(
            MissingFeature(name, "", "not available", is_required) for name, is_required in missing.items()
        ),
        untested,
    )
