"""The demonstrations of the lab; each checks its claims with real connections."""

from pykubeproxy.lab.scenarios.balancing import affinity, edge_cases, scale
from pykubeproxy.lab.scenarios.external import client_address, ingress
from pykubeproxy.lab.scenarios.readiness import conditions, readiness_gate, rolling_update
from pykubeproxy.lab.scenarios.scenario import Log, Scenario, ScenarioFailed
from pykubeproxy.lab.scenarios.syncing import agent_stopped, min_sync_period

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
)

__all__ = ["SCENARIOS", "Log", "Scenario", "ScenarioFailed"]
