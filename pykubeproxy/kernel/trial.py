"""What rules use, tried one by one: each in a rule that is really written, into a namespace of its own."""

import os
from collections.abc import Iterator

import msgspec

from pykubeproxy.kernel import nfacct
from pykubeproxy.kernel.errors import KernelError, NotPermitted, Refused
from pykubeproxy.kernel.features import probe
from pykubeproxy.kernel.iptables import Iptables
from pykubeproxy.kernel.namespace import in_namespace_of_its_own
from pykubeproxy.kernel.runner import Runner
from pykubeproxy.objects import Family

_COUNTER = "pykubeproxy_trial"
_DESTINATION = {Family.IPV4: "192.0.2.1:80", Family.IPV6: "[2001:db8::1]:80"}


class Feature(msgspec.Struct, frozen=True):
    """Something that rules use, the kernel modules that have it, and a rule to try it by.

    Rules can do without one that is not required. {to} in the rule stands for an address and port of the family.
    """

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


class Lack(msgspec.Struct, frozen=True):
    """A feature that is not to be had, and what iptables or the kernel said."""

    feature: str
    modules: str
    reason: str
    required: bool


class Trial(msgspec.Struct, frozen=True):
    """What is lacking. `alone` is why it could only be asked for and not be tried; "" if it was tried."""

    lacking: tuple[Lack, ...]
    alone: str = ""


def try_features(iptables: Iptables) -> Trial:
    """Write a rule for each feature, in a network namespace that is gone afterwards.

    Where no namespace can be made, kernel and tools are asked instead, which touches nothing either. Raises
    NotPermitted where they may not even be asked (CAP_NET_ADMIN), and KernelError.
    """
    # The lock is for the node's own tables: whoever holds it must not keep us waiting, nor are we to leave a file.
    runner = Runner((), {**iptables.runner.environment, "XTABLES_LOCKFILE": os.devnull})
    alone = msgspec.structs.replace(iptables, runner=runner)
    try:
        return in_namespace_of_its_own(lambda: Trial(tuple(_lacking(alone))))
    except NotPermitted as error:
        return _asked(iptables, error.message)


def _lacking(iptables: Iptables) -> Iterator[Lack]:
    counter = nfacct.ensure(_COUNTER)
    try:
        iptables.restore("".join(_input(feature, iptables.family) for feature in FEATURES))
    except NotPermitted:
        raise
    except KernelError:
        # Which of them it is, one by one tells; nearly always all can be written at once.
        for feature in FEATURES:
            if reason := _reason(iptables, feature):
                said = counter.reason or reason if _COUNTER in feature.rule else reason
                yield Lack(feature.name, feature.modules, said, feature.required)


def _reason(iptables: Iptables, feature: Feature) -> str:
    """Why a rule with this feature cannot be written; "" if it can."""
    try:
        iptables.restore(_input(feature, iptables.family))
    except Refused as error:
        return error.message
    except KernelError as error:
        return str(error)
    return ""


def _input(feature: Feature, family: Family) -> str:
    rule = feature.rule.format(to=_DESTINATION[family])
    chain = "POSTROUTING" if "MASQUERADE" in rule else "PREROUTING" if feature.table == "nat" else "INPUT"
    return f"*{feature.table}\n-A {chain} {rule}\nCOMMIT\n"


def _asked(iptables: Iptables, why: str) -> Trial:
    """The same in terms of what can be asked."""
    features = probe(iptables)
    optional = {
        "MASQUERADE --random-fully": features.random_fully,
        "match sctp": features.sctp,
        "match nfacct": features.nfacct,
    }
    lacking = [Lack(name, "", "not there", required=True) for name in features.absent]
    lacking += [Lack(name, "", "not there", required=False) for name, there in optional.items() if not there]
    return Trial(tuple(lacking), alone=why)
