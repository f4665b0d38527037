"""Kubeconfigs with one cluster and one user."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def write_kubeconfig(folder: Path, cluster: Mapping[str, Any], user: Mapping[str, Any] | None = None) -> str:
    """Write a kubeconfig to a folder; return its path."""
    return write_content(
        folder,
        {
            "clusters": [{"name": "c", "cluster": dict(cluster)}],
            "users": [{"name": "u", "user": dict(user or {})}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        },
    )


def write_content(folder: Path, content: Mapping[str, Any]) -> str:
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(dict(content)))
    return str(path)
