"""The smoke test's objects: a web server, its Service and Ingress, and a client."""

from pathlib import Path
from typing import Any

NAMESPACE = "pykubeproxy-smoke"
HOST = "smoke.example"
PORT = 80

_POD = Path(__file__).parent / "pod"
_LABELS = {"app": "web"}

Object = dict[str, Any]


def objects(image: str) -> list[Object]:
    """Return all objects but the Ingress. The image needs Python; the proxy's own is fine."""
    return [
        _object("v1", "Namespace", NAMESPACE),
        _object("v1", "ConfigMap", "programs", data={it.name: it.read_text() for it in _POD.glob("*.py")}),
        _deployment(image),
        _object(
            "v1", "Service", "web", spec={"selector": _LABELS, "ports": [{"port": PORT, "targetPort": 8080}]}
        ),
        _object(
            "v1",
            "Pod",
            "client",
            spec=_pod(image, ["python3", "-c", "import signal; signal.pause()"], grace=0),
        ),
    ]


def ingress() -> Object:
    """Return an Ingress of the class nginx."""
    backend = {"service": {"name": "web", "port": {"number": PORT}}}
    paths = [{"path": "/", "pathType": "Prefix", "backend": backend}]
    spec = {"ingressClassName": "nginx", "rules": [{"host": HOST, "http": {"paths": paths}}]}
    return _object("networking.k8s.io/v1", "Ingress", "web", spec=spec)


def _deployment(image: str) -> Object:
    pod = _pod(image, ["python3", "/programs/server.py"], grace=30)
    pod["containers"][0] |= {
        "ports": [{"containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
    }
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": _LABELS},
        "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {"metadata": {"labels": _LABELS}, "spec": pod},
    }
    return _object("apps/v1", "Deployment", "web", spec=spec)


def _pod(image: str, command: list[str], grace: int) -> Object:
    container: Object = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "volumeMounts": [{"name": "programs", "mountPath": "/programs"}],
    }
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace,
        "containers": [container],
        "volumes": [{"name": "programs", "configMap": {"name": "programs"}}],
    }


def _object(version: str, kind: str, name: str, **content: Any) -> Object:
    namespace = {} if kind == "Namespace" else {"namespace": NAMESPACE}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **namespace}, **content}
