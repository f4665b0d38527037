"""Test the features that rules use, by writing a rule for each into a temporary network namespace."""

import os
from collections.abc import Iterator

import msgspec

from pykubeproxy.kernel import nfacct
from pykubeproxy.kernel.errors import KernelError, NotPermitted, Rejected
from pykubeproxy.kernel.features import probe_features
from pykubeproxy.kernel.iptables import Iptables
from pykubeproxy.kernel.runner import Runner
from pykubeproxy.kernel.system import run_in_new_namespace
from pykubeproxy.objects import Family

_COUNTER = "pykubeproxy_trial"
_DESTINATION = {Family.IPV4: "192.0.2.1:80", Family.IPV6: "[2001:db8::1]:80"}


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
