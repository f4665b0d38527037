"""Version, health, and the groups and resources that are served."""

import msgspec

from pykubeproxy.http import JSON, Response, text
from pykubeproxy.lab.apiserver.resources import RESOURCES, JsonObject

PUBLIC = ("/healthz", "/livez", "/readyz", "/version")  # need no token, as on a real server
_VERSION = {
    "major": "1",
    "minor": "36",
    "gitVersion": "v1.36.0-lab",
    "platform": "linux/amd64",
}
_VERBS = ("create", "delete", "get", "list", "patch", "update", "watch")


def discover(path: str) -> Response | None:
    """Return the response about the server itself, None for any other path."""
    return _PAGES.get(path.rstrip("/"))


def _resource_list(api_version: str) -> JsonObject:
    entries: list[JsonObject] = []
    for resource in RESOURCES:
        if resource.api_version != api_version:
            continue
        kind = {"kind": resource.kind, "namespaced": resource.namespaced}
        names = {"shortNames": [resource.short_name]} if resource.short_name else {}
        entry = {"name": resource.plural, "singularName": resource.kind.lower(), "verbs": _VERBS}
        entries.append(entry | kind | names)
        if resource.status:
            status = {"name": f"{resource.plural}/status", "singularName": ""}
            entries.append(status | kind | {"verbs": ("get", "patch", "update")})
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": entries}


def _group(name: str) -> JsonObject:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


def _pages() -> dict[str, Response]:
    groups = sorted({resource.group for resource in RESOURCES if resource.group})
    documents: dict[str, JsonObject] = {
        "/version": _VERSION,
        "/api": {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
        "/api/v1": _resource_list("v1"),
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in groups]},
    }
    for name in groups:
        documents[f"/apis/{name}"] = {"kind": "APIGroup", "apiVersion": "v1"} | _group(name)
        documents[f"/apis/{name}/v1"] = _resource_list(f"{name}/v1")
    pages = {path: Response(msgspec.json.encode(made) + b"\n", JSON) for path, made in documents.items()}
    return pages | dict.fromkeys(("/healthz", "/livez", "/readyz"), text("ok"))


_PAGES = _pages()
