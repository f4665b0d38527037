"""The demonstrations of the lab; each checks its claims with real connections."""

from pykubeproxy.lab.scenarios.balancing import affinity, client_address, edge_cases, scale
from pykubeproxy.lab.scenarios.changes import agent_stopped, conditions, min_sync_period, rolling_update
from pykubeproxy.lab.scenarios.proxies import ingress, readiness_gate
from pykubeproxy.lab.scenarios.scenario import Log, Scenario, ScenarioFailed
from pykubeproxy.lab.scenarios.symptoms import refused, time_out, uneven

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
)
