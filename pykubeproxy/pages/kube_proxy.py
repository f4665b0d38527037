"""The JSON pages that kube-proxy has too, with its fields. /configz is the KubeProxyConfiguration, see `config.configz`.

Times are in the format of Go, such as 2026-11-20T23:53:58.07Z.
"""

from collections.abc import Mapping

import msgspec


class FamilyHealthPage(msgspec.Struct, frozen=True, rename="camel"):
    """One IP family on a health page.

    - `last_updated`: the last successful sync
    - `healthy`: the rules are in place and up to date; on /livez, the loop does not hang
    """

    last_updated: str
    healthy: bool


class HealthPage(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The pages /healthz, /livez and /readyz. The status of the response is 200 if the page passes, else 503.

    - `last_updated`: the current time while the page passes, else the latest successful sync
    - `current_time`: when the agent answered
    - `node_eligible`: load balancers may send clients to this node; on /healthz only, which needs it to pass
    - `healthy`: what the page checks, apart from the node
    - `reasons`: why lists fail; on /readyz only, and only if they do
    - `status`: the IP families by name
    """

    last_updated: str
    current_time: str
    node_eligible: bool | msgspec.UnsetType = msgspec.UNSET
    healthy: bool
    reasons: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    status: Mapping[str, FamilyHealthPage]


class ServiceReference(msgspec.Struct, frozen=True):
    """The Service of a health check port."""

    namespace: str
    name: str


class ServiceHealthPage(msgspec.Struct, frozen=True, rename="camel"):
    """The health check port of a Service. The status of the response is 200 if both are good, else 503.

    - `service`: whose port this is
    - `local_endpoints`: the number of its ready endpoints on this node
    - `service_proxy_healthy`: the rules of the node are in place and up to date
    """

    service: ServiceReference
    local_endpoints: int
    service_proxy_healthy: bool
