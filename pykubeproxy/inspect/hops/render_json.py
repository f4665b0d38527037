"""The JSON document of `kubectl pykubeproxy trace`."""

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.hops.answer import Answer, Way
from pykubeproxy.inspect.hops.conclusion import conclusion, verdict
from pykubeproxy.inspect.hops.journey import Outcome, Visit
from pykubeproxy.inspect.hops.locations import Location
from pykubeproxy.inspect.hops.notes import next_step, notes
from pykubeproxy.inspect.render_json import rounded


def document(answer: Answer) -> dict[str, object]:
    """The answer as a JSON document of version pykubeproxy/v1.

    {"apiVersion", "verdict": "reached", "likely", "partly", "not-reached" or "unknown",
     "message": the verdict as a sentence,
     "source": {"kind": "pod", "node" or "outside", "address", "node": or null, "pod": "namespace/name" or null},
     "destination": {"protocol": "TCP"|"UDP"|"SCTP", "address": "*" for a node port that is asked at each node, "port",
                     "service": "namespace/name:port" or null,
                     "kind": "cluster-ip", "external-ip", "load-balancer-ip", "node-port", or null},
     "ways": [{"node": the first node whose rules count, or null if none of the group is read,
       "others": [nodes that should do the same, not read], "serves": whether they should have endpoints,
       "outcomes": [{"result": "reached", "dropped", "rejected", "left", "sent" or "lost", "probability",
         "address", "port", "node": or null, "pod": or null, "endpoint": true if rules have chosen it,
         "client": the source that the receiver sees, or null if it is any address of a node,
         "clientAssumed": true if the node may pick another address, "masqueradedOn": a node or null,
         "route": [nodes], "rule": {"table", "chain", "rule"} that drops or rejects it, or null}],
       "visits": [{"node", "route": [nodes before], "probability", "unread": the reason, or null,
         "steps": as those of `pykubeproxy trace`}]}],
     "notes": [sentence], "next": a command that tells more, or null}

    The verdict is "likely" if rules choose an endpoint, but those of its node are unknown; "partly" if it depends on
    chance, or on the node that receives the connection. The probabilities of the outcomes of a way add up to 1. "left"
    means that the packet leaves the cluster; "sent" that the rules of the node to which it goes are unknown; "lost" that
    nodes send it on and on. A connection that "reached" an endpoint fails, and the verdict says so, if replies bypass the
    node that chose the endpoint, or if no EndpointSlice of the Service names it. Keys may be added.
    """
    destination = answer.destination
    return {
        "apiVersion": API_VERSION,
        "verdict": verdict(answer).value,
        "message": conclusion(answer),
        "source": {
            "kind": answer.source.kind.value,
            "address": answer.source.address,
            **_place(answer.source),
        },
        "destination": {
            "protocol": destination.protocol,
            "address": destination.address,
            "port": destination.port,
            "service": destination.service or None,
            "kind": destination.kind.value if destination.kind else None,
        },
        "ways": [_way(way) for way in answer.ways],
        "notes": list(notes(answer)),
        "next": next_step(answer) or None,
    }


def _place(location: Location) -> dict[str, object]:
    return {"node": location.node or None, "pod": location.pod or None}


def _way(way: Way) -> dict[str, object]:
    journey = way.journey
    return {
        "node": way.receivers.read or None,
        "others": list(way.receivers.others),
        "serves": way.receivers.serve,
        "outcomes": [_outcome(outcome) for outcome in journey.outcomes] if journey else [],
        "visits": [_visit(visit) for visit in journey.visits] if journey else [],
    }


def _outcome(outcome: Outcome) -> dict[str, object]:
    step = outcome.step
    return {
        "result": outcome.result.value,
        "probability": rounded(outcome.probability),
        "address": outcome.location.address,
        "port": outcome.port,
        **_place(outcome.location),
        "endpoint": outcome.translated,
        "client": outcome.client or None,
        "clientAssumed": outcome.client_assumed,
        "masqueradedOn": outcome.masqueraded_on or None,
        "route": list(outcome.route),
        "rule": {"table": step.table, "chain": step.chain, "rule": step.rule} if step else None,
    }


def _visit(visit: Visit) -> dict[str, object]:
    return {
        "node": visit.node,
        "route": list(visit.route),
        "probability": rounded(visit.probability),
        "unread": visit.unread or None,
        "steps": msgspec.to_builtins(visit.trace.steps) if visit.trace else [],
    }
