"""What the server tells about itself: version, health, and the groups and resources it serves."""

from collections.abc import Mapping

from pykubeproxy.lab.apiserver.exchange import Response, as_json
from pykubeproxy.lab.apiserver.resources import RESOURCES, JsonObject

VERSION = {
    "major": "1",
    "minor": "36",
    "gitVersion": "v1.36.0-lab",
    "gitCommit": "",
    "gitTreeState": "",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "python",
    "platform": "linux/amd64",
}
PUBLIC = ("/healthz", "/livez", "/readyz", "/version")  # answered without a token, as by the real server
_VERBS = ("create", "delete", "get", "list", "patch", "update", "watch")


def about(path: str) -> Response | None:
    """The answer to a path that is about the server itself, None for any other."""
    return _PAGES.get(path.rstrip("/"))


def _resource_list(api_version: str) -> JsonObject:
    entries: list[JsonObject] = []
    for resource in RESOURCES:
        if resource.api_version != api_version:
            continue
        entry = {
            "name": resource.plural,
            "singularName": resource.kind.lower(),
            "namespaced": resource.namespaced,
        }
        names = {"shortNames": [resource.short_name]} if resource.short_name else {}
        entries.append(entry | {"kind": resource.kind, "verbs": _VERBS} | names)
        if resource.status:
            part = {
                "name": f"{resource.plural}/status",
                "singularName": "",
                "namespaced": resource.namespaced,
            }
            entries.append(part | {"kind": resource.kind, "verbs": ("get", "patch", "update")})
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": entries}


def _group(name: str) -> JsonObject:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


def _pages() -> Mapping[str, Response]:
    groups = sorted({resource.group for resource in RESOURCES if resource.group})
    healthy = Response(b"ok", content_type="text/plain; charset=utf-8")
    pages = dict.fromkeys(("/healthz", "/livez", "/readyz"), healthy)
    pages["/version"] = as_json(VERSION)
    pages["/api"] = as_json({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
    pages["/api/v1"] = as_json(_resource_list("v1"))
    group_list = {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in groups]}
    pages["/apis"] = as_json(group_list)
    for name in groups:
        pages[f"/apis/{name}"] = as_json({"kind": "APIGroup", "apiVersion": "v1"} | _group(name))
        pages[f"/apis/{name}/v1"] = as_json(_resource_list(f"{name}/v1"))
    return pages


_PAGES = _pages()
