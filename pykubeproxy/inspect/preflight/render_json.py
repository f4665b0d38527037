"""The JSON document of `pykubeproxy check`."""

from collections.abc import Sequence

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.preflight.model import Finding, passed


def document(findings: Sequence[Finding], node_name: str, backend: str) -> dict[str, object]:
    """The findings as a JSON document of version pykubeproxy/v1.

    {"apiVersion": "pykubeproxy/v1", "node": the name looked up in the cluster,
     "backend": "nft"|"legacy", "" if there is none,
     "passed": true if no check failed,
     "checks": [{"check": "privileges"|"iptables"|"kernel"|"tables"|"other-tables"|"leftovers"|"proxies"|"ports"|
                          "node-ports"|"forwarding"|"rp-filter"|"br-netfilter"|"conntrack"|"api-server"|"node"|
                          "permissions",
                 "level": "ok"|"warn"|"fail"|"skip",
                 "message": what the check found, "advice": what to do, or "",
                 "family": "IPv4"|"IPv6", null for both}]}

    A check may have several entries. Checks and keys may be added. Messages and advice are for people and may change.
    """
    return {
        "apiVersion": API_VERSION,
        "node": node_name,
        "backend": backend,
        "passed": passed(findings),
        "checks": msgspec.to_builtins(findings),
    }
