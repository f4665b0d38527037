"""Write the Helm chart from the objects that kubectl builds from manifests/: `python -m tests.chart FOLDER [DIST]`.

With its default values, the chart renders the objects of overlays/default. DIST is a folder for an archive of it,
with the date SOURCE_DATE_EPOCH.
"""

import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import pykubeproxy

ROOT = Path(__file__).parents[1]
_OVERLAYS = ROOT / "manifests/overlays"
_NAME = "pykubeproxy"
_IMAGE = (
    "{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}"
    "{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}"
)
_API_SERVER = (
    "{{ with .Values.apiServer }}{{ if .host }}"
    "{{ dict `KUBERNETES_SERVICE_HOST` .host `KUBERNETES_SERVICE_PORT` (toString .port) | toJson }}"
    "{{ else }}{}{{ end }}{{ end }}"
)
# A ConfigMap's name ends in a hash of its content, as kustomize has it.
_HASHES = {_NAME: "{{ sha256sum .Values.config | trunc 10 }}"}
_HASHES[f"{_NAME}-api-server"] = "{{ toJson .Values.apiServer | sha256sum | trunc 10 }}"
_COMMENTS = {
    "image": "The image that you pushed; no registry has this one. A digest replaces the tag, by default this version.",
    "apiServer": "The address of the control plane or its load balancer. The Service `kubernetes` does not work for the agent,\n"
    "because a node that has just started has no rules for it.",
    "config": "The configuration. To set it from a file: --set-file config=config.conf",
    "extraArgs": "Flags of `run` for the agent. A flag replaces its field of the configuration.",
    "resources": "Of the agent. Without enough memory, Services are not updated; without a CPU limit, they are in time.",
    "tolerations": "The agent belongs on every node.",
    "affinity": "Nodes with the label service-proxy=kube-proxy keep kube-proxy.",
    "priorityClassName": "Of the pods.",
    "updateStrategy": "Of the DaemonSet. The rules stay in place while an agent restarts.",
    "podAnnotations": "Of the pods, beside kubectl's default container.",
    "monitoring": "Monitors, alerts and dashboard, for the Prometheus operator. Needs metricsBindAddress: 0.0.0.0:10249 in config.\n"
    "runbooks is where you serve the page docs/operations/runbooks.md.",
}

Object = dict[str, Any]


def kustomize(folder: Path) -> list[Object]:
    """Return the objects of a folder with a kustomization, as kubectl builds them."""
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def files() -> dict[str, str]:
    """Return the text of each file of the chart, by its path."""
    objects = kustomize(_OVERLAYS / "default")
    (daemon_set,) = (item for item in objects if item["kind"] == "DaemonSet")
    pod = daemon_set["spec"]["template"]["spec"]
    (agent,) = pod["containers"]
    repository, tag = agent["image"].rsplit(":", 1)
    assert tag == pykubeproxy.__version__
    values: Object = {
        "image": {"repository": repository, "tag": "", "digest": ""},
        "apiServer": {"host": "", "port": 6443},
    }
    # Each marker stands for a template, which may not be YAML.
    marks: dict[str, str] = {"image": _IMAGE}
    for item in (*pod["initContainers"], agent):
        item["image"] = "@image@"
    for item in objects:
        if item["kind"] != "ConfigMap":
            continue
        # Pods of the last revision may start again until all nodes have the new one.
        item["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
        if "data" in item:
            values["config"] = item["data"]["config.conf"]
            item["data"]["config.conf"] = "@config@"
            marks["config"] = "{{ toJson .Values.config }}"
        else:
            item["data"] = "@apiServer@"
            marks["apiServer"] = _API_SERVER
    values["extraArgs"] = []
    marks["args"] = (
        f"{{{{ concat (fromJsonArray `{json.dumps(agent['args'])}`) .Values.extraArgs | toJson }}}}"
    )
    agent["args"] = "@args@"
    owners = {"resources": agent, "updateStrategy": daemon_set["spec"]}
    for key in ("resources", "tolerations", "affinity", "priorityClassName", "updateStrategy"):
        owner = owners.get(key, pod)
        values[key], owner[key] = owner[key], f"@{key}@"
        marks[key] = f"{{{{ toJson .Values.{key} }}}}"
    values["podAnnotations"] = {}
    meta = daemon_set["spec"]["template"]["metadata"]
    fixed = json.dumps(meta["annotations"])
    marks["podAnnotations"] = f"{{{{ mergeOverwrite (fromJson `{fixed}`) .Values.podAnnotations | toJson }}}}"
    meta["annotations"] = "@podAnnotations@"
    monitoring = kustomize(_OVERLAYS / "monitoring")
    (runbooks,) = set(re.findall(r'https://[^"#\s]*runbooks\.html', json.dumps(monitoring)))
    values["monitoring"] = {"enabled": False, "runbooks": runbooks}
    alerts = _text(monitoring, {}).replace(runbooks, "{{ .Values.monitoring.runbooks }}")
    chart = {
        "apiVersion": "v2",
        "name": _NAME,
        "description": "A Kubernetes service proxy that works through iptables",
        "version": pykubeproxy.__version__,
        "appVersion": pykubeproxy.__version__,
        "kubeVersion": ">=1.21.0-0",
    }
    return {
        "Chart.yaml": yaml.safe_dump(chart, sort_keys=False),
        "values.yaml": _commented(values),
        "values.schema.json": json.dumps(_schema(values), indent=2) + "\n",
        "LICENSE": (ROOT / "LICENSE").read_text(),
        "templates/agent.yaml": _text(objects, marks),
        "templates/monitoring.yaml": f"{{{{- if .Values.monitoring.enabled }}}}\n{alerts}{{{{- end }}}}\n",
    }


def _text(objects: list[Object], marks: Mapping[str, str]) -> str:
    """Return objects as a template. Braces that are no template, as in alerts, are escaped first."""
    text = yaml.safe_dump_all(objects, sort_keys=False, width=1000)
    text = re.sub(r"\{\{|\}\}", lambda found: f"{{{{`{found[0]}`}}}}", text)
    text = text.replace("namespace: kube-system", "namespace: {{ .Release.Namespace }}")
    for mark, template in marks.items():
        text = text.replace(f"'@{mark}@'", template)
    for item in objects:
        if item.get("immutable"):
            name = item["metadata"]["name"]
            stem = name.rpartition("-")[0]
            text = text.replace(name, f"{stem}-{_HASHES[stem]}")
    return text


def _commented(values: Object) -> str:
    return "\n".join(
        "".join(f"# {line}\n" for line in _COMMENTS[key].splitlines())
        + yaml.dump({key: value}, Dumper=_Dumper, sort_keys=False, width=1000)
        for key, value in values.items()
    )


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text_node)
_OPEN = ("resources", "affinity", "updateStrategy", "podAnnotations")
_TYPES = {str: "string", bool: "boolean", int: "integer", list: "array"}


def _schema(values: Object) -> Object:
    """Return the schema of values: their types, and no other keys, except in values of the Kubernetes API."""
    properties = {
        key: {"type": "object"}
        if key in _OPEN
        else _schema(value)
        if isinstance(value, dict)
        else {"type": _TYPES[type(value)]}
        for key, value in values.items()
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def write(folder: Path) -> None:
    """Write the chart into a folder and remove all else there."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def archive(path: Path, date: int) -> None:
    """Write the chart as an archive that helm takes. The same chart and date give the same bytes."""
    with (
        path.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=date) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, text in files().items():
            entry = tarfile.TarInfo(f"{_NAME}/{name}")
            entry.size, entry.mtime = len(text.encode()), date
            tar.addfile(entry, io.BytesIO(text.encode()))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    if sys.argv[2:]:
        path = Path(sys.argv[2]) / f"{_NAME}-chart-{pykubeproxy.__version__}.tgz"
        archive(path, int(os.environ["SOURCE_DATE_EPOCH"]))
