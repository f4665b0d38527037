"""What the lab tells, as documents for JSON, of version pykubeproxy/v1. Keys may be added to them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pykubeproxy import API_VERSION
from pykubeproxy.lab.api import Object
from pykubeproxy.lab.network import FABRIC
from pykubeproxy.lab.report import Result, agent_runs
from pykubeproxy.lab.scenarios import Scenario

Document = dict[str, object]


def listed(scenarios: Iterable[Scenario]) -> Document:
    """The scenarios that there are.

    {"apiVersion", "scenarios": [{"name", "title", "does", "why", "look"}]}
    """
    return {
        "apiVersion": API_VERSION,
        "scenarios": [
            {"name": it.name, "title": it.title, "does": it.does, "why": it.why, "look": it.look}
            for it in scenarios
        ],
    }


def demonstrated(lab: str, backend: str, results: Iterable[Result], seconds: float) -> Document:
    """What scenarios saw.

    {"apiVersion", "lab", "backend", "ok": whether all was as it should be, "seconds",
     "scenarios": [{"name", "title", "ok", "seconds", "seen": [{"label", "text"}], "failure": or null}]}
    """
    results = tuple(results)
    return {
        "apiVersion": API_VERSION,
        "lab": lab,
        "backend": backend,
        "ok": all(it.well for it in results),
        "seconds": round(seconds, 3),
        "scenarios": [
            {
                "name": it.name,
                "title": it.title,
                "ok": it.well,
                "seconds": round(it.seconds, 3),
                "seen": [{"label": label, "text": text} for label, text in it.seen],
                "failure": it.failure or None,
            }
            for it in results
        ],
    }


def standing(state: Mapping[str, Any], services: Sequence[Object], logs: str) -> Document:
    """A lab that stands.

    {"apiVersion", "lab", "logs": a directory, "api": the API server's URL,
     "places": [{"place", "kind": "fabric", "node", "client" or "pod", "addresses": [IPv4, IPv6],
       "node": a pod's or null, "state": a pod's, such as "ready", or null, "agent": a node's agent's pid, or null}],
     "services": [{"namespace", "name", "clusterIPs", "ports": [{"port", "protocol", "nodePort": or null}]}]}
    """
    places = [
        _place("fabric", "fabric", FABRIC),
        *(
            _place(name, "node", it["addresses"], agent=it["agent"] if agent_runs(it["agent"]) else None)
            for name, it in state["nodes"].items()
        ),
        _place("client", "client", state["client"]["addresses"]),
        *(
            _place(name, "pod", it["addresses"], node=it["node"], state=it["state"])
            for name, it in state["pods"].items()
        ),
    ]
    return {
        "apiVersion": API_VERSION,
        "lab": state["name"],
        "logs": logs,
        "api": state["api"],
        "places": places,
        "services": [_service(it) for it in services],
    }


def removed(lab: str, there: bool) -> Document:
    """A lab that is gone.

    {"apiVersion", "lab", "removed": whether there was one}
    """
    return {"apiVersion": API_VERSION, "lab": lab, "removed": there}


def _place(
    name: str,
    kind: str,
    addresses: Sequence[str],
    node: str | None = None,
    state: str | None = None,
    agent: int | None = None,
) -> Document:
    return {
        "place": name,
        "kind": kind,
        "addresses": list(addresses),
        "node": node,
        "state": state,
        "agent": agent,
    }


def _service(service: Object) -> Document:
    metadata, spec = service["metadata"], service["spec"]
    return {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "clusterIPs": spec["clusterIPs"],
        "ports": [
            {"port": port["port"], "protocol": port["protocol"], "nodePort": port.get("nodePort")}
            for port in spec["ports"]
        ],
    }
