"""The sides of `pykubeproxy diff`: objects and a configuration, from which the rules of a node follow."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from pykubeproxy.cli.flags import read_config
from pykubeproxy.cli.inputs import Source, agent_objects, all_objects, host_name, read_objects
from pykubeproxy.cli.running_agent import AgentState
from pykubeproxy.cli.terminal import echo_line
from pykubeproxy.config import Config
from pykubeproxy.objects import Family
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.difference import installed
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.wording import listed

# Most comparisons read no bundle, so only the functions that need one import the modules for it.
if TYPE_CHECKING:
    from pykubeproxy.bundle.read import Bundle

_INFERRED = (
    "Note: the bundle does not have the configuration of the proxy, so its settings are inferred from its rules. To"
    " compare with other settings, add --config or other flags of `run`."
)
# Flags that say where objects come from, not how rules are made.
_SOURCE_FLAGS = frozenset(("kubeconfig", "master", "hostname-override"))


class Side(NamedTuple):
    """One side of the comparison. `title` says where its objects and its configuration come from.

    `infer` returns the rules with the settings of given live rules, if the configuration is unknown.
    """

    title: str
    source: Source
    config: Config
    infer: Callable[[Ruleset], Ruleset] | None = None

    def addresses(self, facts: KernelFacts) -> tuple[str, ...]:
        """Return the node's addresses: those of the facts, or else those of the Node."""
        return facts.addresses or self.source.node.addresses

    def ruleset(self, family: Family, facts: KernelFacts) -> Ruleset:
        """Return the rules of a family; if the facts have no addresses, with those of the Node."""
        cluster, node, api_servers = self.source
        facts = msgspec.structs.replace(facts, addresses=self.addresses(facts))
        context = rule_context(self.config, node.name, node, facts, family, api_servers)
        return installed(render(cluster, context), context.options)


def settings_title(flags: Mapping[str, object]) -> str:
    """Return where the configuration comes from: the file of --config, nothing but flags (""), or defaults."""
    return str(flags.get("config", "" if flags else "default settings"))


def of_objects(filename: str | None, config: Config, settings: str) -> Side:
    """Return the side of the objects of -f, else of the API server. Raises ClickException."""
    if filename is None:
        return Side(_title("API server", settings), all_objects(config), config)
    return Side(_title(filename, settings), Source(*read_objects(filename, config)), config)


def of_this_node(filename: str | None, config: Config, settings: str) -> Side:
    """Return the side of this node, unless the configuration names another one. Raises ClickException."""
    name = config.hostname_override or host_name()
    return of_objects(filename, msgspec.structs.replace(config, hostname_override=name), settings)


def of_named_node(filename: str | None, config: Config, settings: str) -> Side:
    """Return the side of the node that the configuration or the objects name. Raises ClickException."""
    if config.hostname_override or filename is not None:
        side = of_objects(filename, config, settings)
        if side.source.node.name:
            return side
    raise click.ClickException("--rules does not tell the name of the node; give it with --hostname-override")


def of_agent(agent: AgentState, title: str = "objects and configuration of the agent") -> Side:
    """Return the side of an agent, and print which Services it has quarantined."""
    if quarantined := sorted({str(it.port_name) for it in agent.objects.quarantined}):
        echo_line(f"The agent has quarantined {listed(quarantined, 5)}; their rules differ.", err=True)
    config = msgspec.structs.replace(agent.config, hostname_override=agent.objects.node.name)
    return Side(title, agent_objects(agent.objects), config)


def of_bundle(bundle: "Bundle", filename: str | None, config: Config, flags: Mapping[str, object]) -> Side:
    """Return the side of a bundle's node: options come before what the bundle has. Raises ClickException.

    If neither has the configuration of the proxy, settings are inferred from its rules.
    """
    from pykubeproxy.cli.bundle_agent import NoObjects, bundled_agent

    elsewhere = filename is not None or any(it in flags for it in ("kubeconfig", "master"))
    try:
        agent = bundled_agent(bundle)
    except NoObjects:
        if not elsewhere:
            raise
        agent = None
    given = flags.keys() - _SOURCE_FLAGS
    known = agent.config if agent and not given else None
    inferred = known is None and not given
    settings = str(flags.get("config", ""))
    node = config.hostname_override or bundle.manifest.node
    if known:
        config = msgspec.structs.replace(known, client=config.client)
        settings = f"the configuration in {bundle.name}"
    elif inferred:
        echo_line(_INFERRED, err=True)
        settings = "settings inferred from the rules"
    config = msgspec.structs.replace(config, hostname_override=node)
    if elsewhere or agent is None:
        side = of_objects(filename, config, settings)
    elif known:
        state = AgentState(agent.objects, config, bundle.name)
        return of_agent(state, f"objects and configuration in {bundle.name}")
    else:
        side = Side(_title(f"objects in {bundle.name}", settings), agent_objects(agent.objects), config)
    return side._replace(infer=_inferring(side.source, bundle.manifest.proxy)) if inferred else side


def _inferring(source: Source, proxy: str) -> Callable[[Ruleset], Ruleset]:
    from pykubeproxy.inspect.fleet.model import FleetComparison

    comparison = FleetComparison(source.cluster)
    return lambda live: comparison.desired(source.node, live, proxy)


def other(side: Side, against: str | None, against_config: str | None, flags: Mapping[str, object]) -> Side:
    """Return the side to compare with: its objects are those of --against, or its configuration that of --against-config.

    Raises ClickException.
    """
    config = side.config
    if against_config is not None:
        theirs = read_config({**flags, "config": against_config}, "--against-config")
        name = theirs.hostname_override or config.hostname_override
        config = msgspec.structs.replace(theirs, hostname_override=name)
    if against is not None:
        return Side(_title(against, against_config or ""), Source(*read_objects(against, config)), config)
    return Side(_title("the same objects", against_config or ""), side.source, config)


def _title(objects: str, settings: str) -> str:
    return f"{objects} with {settings}" if settings else objects
