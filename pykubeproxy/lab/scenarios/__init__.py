"""The demonstrations of the lab; each checks its claims with real connections."""

from pykubeproxy.lab.scenarios.scenario import Log, Scenario, ScenarioFailed
from pykubeproxy.lab.scenarios.symptoms import probes, refused, time_out, uneven
from pykubeproxy.lab.scenarios.traffic import (
    affinity,
    agent_stopped,
    client_address,
    conditions,
    edge_cases,
    ingress,
    min_sync_period,
    readiness_gate,
    rolling_update,
    scale,
)

SCENARIOS: tuple[Scenario, ...] = (
    scale,
    agent_stopped,
    min_sync_period,
    client_address,
    ingress,
    affinity,
    rolling_update,
    readiness_gate,
    conditions,
    edge_cases,
    refused,
    time_out,
    uneven,
    probes,
)
