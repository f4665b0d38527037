"""The layout of a bundle: a gzip-compressed tar with one folder of plain files, and a manifest about them."""

import re
from collections.abc import Iterable
from datetime import datetime

import msgspec

from pykubeproxy.objects import Family

# Readers refuse a higher number. A new file needs no new number: readers ignore unknown files.
FORMAT = 1

MANIFEST = "manifest.json"
NFT_RULESET = "nft-ruleset.json"
ADDRESSES = "addresses.json"
INTERFACES = "interfaces.json"
ROUTES = "routes.json"
ROUTING_RULES = "routing-rules.json"
SYSCTLS = "sysctls.txt"
CONNTRACK = "conntrack.json"
FLOWS = "flows.txt"
VERSIONS = "versions.json"
STATUS = "statusz.json"
OBJECTS = "servicez.json"
CONFIGURATION = "configz.json"
METRICS = "metrics.txt"

_PROGRAMS = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}


def tables_file(family: Family, backend: str) -> str:
    """Return the name of the file with the tables of a family in a backend, "" if that is unknown."""
    return "-".join(filter(None, (_PROGRAMS[family], backend, "save.txt")))


BACKEND_TABLES = tuple(tables_file(family, backend) for backend in ("nft", "legacy") for family in Family)
# Used when the program name does not show the backend.
PLAIN_TABLES = tuple(tables_file(family, "") for family in Family)
TABLES = (*BACKEND_TABLES, *PLAIN_TABLES)

_TABLES_OF = "the {} tables of {}, as `{}` prints them with `--counters`"
# Each file and what it holds, in the order of a bundle.
FILES = {
    MANIFEST: "which files the bundle has, where they come from and which are missing; the node and its proxy",
    **{
        tables_file(family, backend): _TABLES_OF.format(
            backend, family.value, f"{_PROGRAMS[family]}-{backend}-save"
        )
        for backend in ("nft", "legacy")
        for family in Family
    },
    **{
        tables_file(
            family, ""
        ): f"the {family.value} tables of a kube-proxy pod, instead of the four files above"
        for family in Family
    },
    NFT_RULESET: "the output of `nft -j list ruleset`, with the rules of other programs and of other modes of kube-proxy",
    ADDRESSES: "the addresses of all interfaces",
    INTERFACES: "the interfaces and their kinds, such as `bridge`",
    ROUTES: "the routes of all routing tables",
    ROUTING_RULES: "the rules of policy routing",
    SYSCTLS: "kernel settings that matter to Services, as `sysctl` prints them",
    CONNTRACK: "how many connections the kernel tracks by protocol and state, and for the Services with most of them;"
    " no addresses of clients",
    FLOWS: "with `--flows` only: the tracked connections, as /proc/net/nf_conntrack prints them, and the clients that"
    " session affinity remembers; with addresses of clients",
    VERSIONS: "versions of pykubeproxy, Python, the kernel, iptables, nft and the distribution",
    STATUS: "the agent's status, as `pykubeproxy status -o json` prints it",
    OBJECTS: "the Services, EndpointSlices and the Node that the agent knows, with the fields that pykubeproxy reads,"
    " and its configuration",
    CONFIGURATION: "the configuration of the agent, or of kube-proxy; a kubeconfig is only named",
    METRICS: "the metrics of the agent, or of kube-proxy",
}


class BundledFile(msgspec.Struct, frozen=True, rename="camel"):
    """Where one file of the bundle comes from, or why it is missing.

    - `name`: its name in the folder of the bundle
    - `source`: the command, request or path it comes from
    - `size`: in bytes
    - `error`: why the file is missing, "" if it is there
    """

    name: str
    source: str
    size: int = 0
    error: str = ""


class Manifest(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Which node a bundle describes and which files it has. Keys may be added.

    - `format`: the number of this layout
    - `version`: of the pykubeproxy that made the bundle
    - `node`: the name of the node
    - `time`: when collection began, in UTC, such as 2026-01-31T12:00:00Z
    - `proxy`: the proxy whose rules these are, such as "kube-proxy v1.35.1"; "" if unknown
    - `files`: all files in the order of the bundle, those that could not be collected too
    """

    format: int = FORMAT
    version: str
    node: str
    time: str
    proxy: str = ""
    files: tuple[BundledFile, ...] = ()


def timestamp(time: datetime) -> str:
    """Return a time in UTC as the manifest has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def folder_name(node: str, time: str) -> str:
    """Return the name of a bundle's folder, and of its file without ending. It is a safe file name for any node."""
    safe = re.sub(r"[^-.a-z0-9]", "-", node.lower())[:63].strip("-.")
    return "-".join(filter(None, ("pykubeproxy-bundle", safe, re.sub(r"[^0-9TZ]", "", time))))


def missing(files: Iterable[BundledFile]) -> tuple[BundledFile, ...]:
    """Return the files that could not be collected."""
    return tuple(file for file in files if file.error)
