"""Read the tables of one node by exec: with iptables-save and its kin, and nothing else of the image."""

from collections.abc import Mapping
from typing import NamedTuple

from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.rules.saves import SavedFile, SavedTables, read_saves
from pykubeproxy.rules.skeleton import NAT_SERVICES
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.exec import ContainerRef, NotInImage, run
from pykubeproxy.sources.failures import Failure
from pykubeproxy.wording import one_line

_PREFIX = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
# After so many seconds without output, iptables-save hangs; it writes large tables without pauses.
_SILENCE = 30.0
# iptables-nft-save warns so, on standard output or standard error by version.
_LEGACY_TOO = "-legacy tables present"
_IPVS = "--match-set KUBE-"


class PrintedTables(NamedTuple):
    """The tables that programs of a pod print.

    `unread` says why the tables of a family are missing. `legacy_too` is True if iptables-nft-save warns about tables of
    the legacy backend.
    """

    tables: tuple[SavedTables, ...]
    unread: Mapping[Family, str]
    legacy_too: bool = False


def read_tables(client: Client, container: ContainerRef) -> PrintedTables:
    """Return the tables of a node: of both backends, unless one serves it and the other is empty.

    Raises Failure if no family can be read, NotInImage without iptables-save, InvalidSave for other output.
    """
    try:
        nft = _save(client, container, "nft-save")
    except NotInImage:
        # An image with one backend, which its iptables-save reads.
        return _save(client, container, "save")
    if any(NAT_SERVICES in it.ruleset.chains for it in nft.tables) and not nft.legacy_too:
        return nft
    try:
        legacy = _save(client, container, "legacy-save")
    except NotInImage:
        return nft
    return PrintedTables((*nft.tables, *legacy.tables), {**legacy.unread, **nft.unread})


def runs_ipvs(ruleset: Ruleset) -> bool:
    """Return whether the rules are those of kube-proxy's ipvs mode."""
    return any(_IPVS in rule for rule in ruleset.chains.get(NAT_SERVICES, ()))


def has_nftables_proxy(client: Client, container: ContainerRef) -> bool:
    """Return whether a node has the tables of kube-proxy's nftables mode; False if the image has no nft.

    Raises Failure.
    """
    try:
        tables = run(client, container, ("nft", "list", "tables")).output
    except NotInImage:
        return False
    return any(line.split()[-1:] == [b"kube-proxy"] for line in tables.splitlines())


def _save(client: Client, container: ContainerRef, program: str) -> PrintedTables:
    """Run a program such as "nft-save" for both families. The kernel of a node may lack one."""
    files: list[SavedFile] = []
    unread: dict[Family, str] = {}
    legacy_too = False
    for family, prefix in _PREFIX.items():
        name = f"{prefix}-{program}"
        saved = run(client, container, (name, "-c"), silence=_SILENCE)
        if saved.exit_code:
            reason = one_line(saved.errors) or "no message"
            unread[family] = f"{name} exited with status {saved.exit_code}: {reason}"
            continue
        text = saved.output.decode(errors="surrogateescape")
        legacy_too |= _LEGACY_TOO in text + saved.errors
        if "\n*" in text or text.startswith("*"):
            files.append(SavedFile(f"{name} in pod {container}", text))
    if len(unread) == len(_PREFIX):
        raise Failure(f"cannot read the rules in pod {container}: {next(iter(unread.values()))}")
    return PrintedTables(read_saves(files), unread, legacy_too)
