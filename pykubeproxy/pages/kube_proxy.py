"""The JSON pages that kube-proxy has too, with its fields. /configz is the KubeProxyConfiguration, see `config.configz`.

Times are in the format of Go, such as 2026-11-20T23:53:58.07Z.
"""

from collections.abc import Mapping

import msgspec

# The group of the API objects, its deprecated version, and all its versions, the preferred one first.
GROUP, DEPRECATED = "config.k8s.io", "v1alpha1"
VERSIONS = ("v1beta1", DEPRECATED)


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


class PageMetadata(msgspec.Struct, frozen=True):
    """The metadata of an API object: the name of the component."""

    name: str = "kube-proxy"


class FlagzPage(msgspec.Struct, frozen=True, rename="camel", tag_field="kind", tag="Flagz", kw_only=True):
    """The page /flagz as an API object.

    - `api_version`: group and version of the object
    - `metadata`: the name of the component
    - `flags`: the value of each flag in force
    """

    api_version: str
    metadata: PageMetadata = PageMetadata()
    flags: Mapping[str, str]


class StatuszPage(msgspec.Struct, frozen=True, rename="camel", tag_field="kind", tag="Statusz", kw_only=True):
    """The page /statusz as an API object.

    - `api_version`: group and version of the object
    - `metadata`: the name of the component
    - `start_time`, `uptime_seconds`: when the process started, and for how long it has run
    - `go_version`: always empty
    - `binary_version`: the version of pykubeproxy
    - `emulation_version`: the version of kube-proxy that it stands for
    - `paths`: the pages of this address
    """

    api_version: str
    metadata: PageMetadata = PageMetadata()
    start_time: str
    uptime_seconds: int
    go_version: str = ""
    binary_version: str
    emulation_version: str
    paths: tuple[str, ...]


class NotAcceptable(
    msgspec.Struct, frozen=True, rename="camel", tag_field="kind", tag="Status", kw_only=True
):
    """The answer to a request that accepts none of the forms of a page; `message` lists them."""

    api_version: str = "v1"
    metadata: Mapping[str, str] = {}
    status: str = "Failure"
    message: str
    reason: str = "NotAcceptable"
    code: int = 406
