"""What the lab shows, one after the other; each asserts with real connections."""

from pykubeproxy.lab.scenarios import balancing, conditions, corners, lagging, outside, rollouts
from pykubeproxy.lab.scenarios.scenario import Say, Scenario, ScenarioFailed

SCALE, AFFINITY = balancing.SCENARIOS

SCENARIOS: tuple[Scenario, ...] = (
    SCALE,
    *lagging.SCENARIOS,
    *outside.SCENARIOS,
    AFFINITY,
    *rollouts.SCENARIOS,
    *conditions.SCENARIOS,
    *corners.SCENARIOS,
)

__all__ = ["SCENARIOS", "Say", "Scenario", "ScenarioFailed"]
