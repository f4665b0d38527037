"""Find and merge kubeconfigs as kubectl does."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pykubeproxy.sources.kubeconfig import Kubeconfigs
from pykubeproxy.sources.watch import SourceError

_LISTS = ("clusters", "users", "contexts")
# The settings of an entry that name files, relative to the folder of its kubeconfig.
_PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


def user_kubeconfigs(path: str, context: str, environment: Mapping[str, str]) -> Kubeconfigs | None:
    """Return the kubeconfigs that kubectl would read: `path`, else those of KUBECONFIG, else ~/.kube/config.

    Return None if there are none in a pod, where kubectl then uses the service account. Raises SourceError if there are
    none elsewhere, or if `path` is missing.
    """
    if path:
        if not Path(path).expanduser().is_file():
            raise SourceError(f"kubeconfig {path} does not exist or is not a file")
        return Kubeconfigs((path,), context)
    named = [it for it in environment.get("KUBECONFIG", "").split(os.pathsep) if it]
    paths = tuple(dict.fromkeys(named or [str(Path.home() / ".kube" / "config")]))
    if any(Path(it).is_file() for it in paths):
        return Kubeconfigs(paths, context)
    if named:
        raise SourceError(f"KUBECONFIG names no file that exists: {os.pathsep.join(named)}")
    if context or "KUBERNETES_SERVICE_HOST" not in environment:
        raise SourceError("there is no kubeconfig; set --kubeconfig or KUBECONFIG")
    return None


def read_merged(kubeconfigs: Kubeconfigs) -> dict[str, Any]:
    """Return one decoded kubeconfig with absolute paths. Raises SourceError, OSError and YAMLError."""
    merged: dict[str, Any] = {name: {} for name in _LISTS} | {"current-context": ""}
    for file in (Path(it).expanduser() for it in kubeconfigs.paths):
        if not file.is_file():
            continue
        content = yaml.safe_load(file.read_bytes())
        if content is None:
            continue
        if not isinstance(content, dict):
            raise SourceError(f"{file} is not a mapping")
        merged["current-context"] = merged["current-context"] or content.get("current-context") or ""
        for kind in _LISTS:
            for entry in _entries(content.get(kind), file):
                merged[kind].setdefault(entry.get("name"), entry)
    current = kubeconfigs.context or merged["current-context"]
    return {kind: list(merged[kind].values()) for kind in _LISTS} | {"current-context": current}


def context_namespace(kubeconfigs: Kubeconfigs) -> str:
    """Return the namespace of the context, "" if it names none. Raises SourceError."""
    try:
        content = read_merged(kubeconfigs)
        contexts = {it.get("name"): it.get("context") or {} for it in content["contexts"]}
        return str(contexts.get(content["current-context"], {}).get("namespace") or "")
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise SourceError(f"cannot use kubeconfig {kubeconfigs}: {' '.join(str(error).split())}") from None


def _entries(value: object, file: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a list, with absolute paths."""
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, dict):
            yield {key: _absolute(it, file.absolute().parent) for key, it in entry.items()}


def _absolute(settings: Any, folder: Path) -> Any:
    if not isinstance(settings, dict):
        return settings
    changed: dict[str, Any] = {
        key: str(folder / settings[key])
        for key in _PATHS
        if isinstance(settings.get(key), str) and settings[key]
    }
    plugin = settings.get("exec")
    if isinstance(plugin, dict) and "/" in str(plugin.get("command", "")):
        changed["exec"] = {**plugin, "command": str(folder / plugin["command"])}
    return {**settings, **changed}
