"""Where commands look up the names of pods, Services and nodes: files, the agent, an API server, or rules."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from pykubeproxy.cli.inputs import host_name, open_client
from pykubeproxy.cli.node_rules import NodeRules
from pykubeproxy.cli.terminal import click_errors
from pykubeproxy.config import Config, DetectLocalMode
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.inspect.targets import Directory, Target, TargetKind
from pykubeproxy.inspect.targets.from_rules import services_of
from pykubeproxy.objects import EndpointSlice, Family, Node, Object, Service

# Importing pykubeproxy.sources takes half a second, so only the functions that need it do.
if TYPE_CHECKING:
    from pykubeproxy.agent.observe.object_documents import Objects
    from pykubeproxy.bundle.read import Bundle
    from pykubeproxy.sources.manifests import Manifests

_ASK_SERVER = "add --kubeconfig to ask the API server"
_ASK_OTHERS = "add -f FILE with objects, or --kubeconfig to ask the API server"
_Object = TypeVar("_Object", Service, EndpointSlice, Node)


class ObjectSource(Protocol):
    """A place with objects."""

    def directory(self, targets: Sequence[Target]) -> Directory:
        """Return at least the objects that the targets name, and those with similar names. Raises ClickException."""


class ManifestObjects(NamedTuple):
    """The objects in files; `here` is the name of the node that the configuration selects."""

    path: str
    manifests: "Manifests"
    config: Config
    here: str = ""

    def directory(self, targets: Sequence[Target]) -> Directory:  # noqa: ARG002
        """Return all objects."""
        objects = self.manifests.objects
        return Directory(
            f"in {'standard input' if self.path == '-' else self.path}",
            advice=dict.fromkeys(TargetKind, "give an address, or add the object to the file"),
            services=_only(Service, objects),
            slices=_only(EndpointSlice, objects),
            nodes=_only(Node, objects),
            listed_pods=self.manifests.pods,
            pod_networks=_pod_networks(self.config),
            here=self.here,
        )


def object_source(config: Config, rules: NodeRules, *, is_live: bool) -> ObjectSource:
    """Return the API server that the configuration names; else the agent, for live rules; else the rules."""
    if config.client.kubeconfig or config.client.master:
        return ServerObjects(config, config.hostname_override or (host_name() if is_live else ""))
    return AgentObjects(rules) if is_live else RuleNames(rules)


def bundle_source(config: Config, rules: NodeRules, bundle: "Bundle") -> ObjectSource:
    """Return the API server that the configuration names; else the agent in a bundle."""
    if config.client.kubeconfig or config.client.master:
        return ServerObjects(config, config.hostname_override or bundle.manifest.node)
    return BundleObjects(bundle, config, rules)


class BundleObjects(NamedTuple):
    """The objects of the agent in a bundle; without them, the Services in the rules."""

    bundle: "Bundle"
    config: Config
    rules: NodeRules

    def directory(self, targets: Sequence[Target]) -> Directory:
        """Return all objects. Raises ClickException."""
        from pykubeproxy.cli.bundle_agent import NoObjects, bundled_agent

        try:
            found = bundled_agent(self.bundle)
        except NoObjects:
            return RuleNames(self.rules).directory(targets)
        return directory_of(found.objects, found.config or self.config, f"in {self.bundle.name}")


class AgentObjects(NamedTuple):
    """The objects of the agent on this node; without one, the Services in the live rules."""

    rules: NodeRules

    def directory(self, targets: Sequence[Target]) -> Directory:
        """Ask the agent, which knows the pods of Services and its own Node only. Raises ClickException."""
        from pykubeproxy.cli.client import NoAgent

        try:
            return self._agent_directory(targets)
        except NoAgent:
            return RuleNames(self.rules).directory(targets)

    def _agent_directory(self, targets: Sequence[Target]) -> Directory:
        from pykubeproxy.cli.running_agent import agent_state

        services = [it.key for it in targets if it.kind is TargetKind.SERVICE]
        if any(it.kind is TargetKind.POD for it in targets):
            found = agent_state(None, slices="all")
        else:
            found = agent_state(None, **({"service": str(services[0])} if services else {}))
            if services and not found.objects.services:
                found = agent_state(None)  # for similar names
        return directory_of(found.objects, found.config, "in the agent on this node")


def directory_of(objects: "Objects", config: Config, place: str) -> Directory:
    """Return the objects of an agent, which stand at `place`."""
    return Directory(
        place,
        advice={
            TargetKind.POD: f"the agent knows only pods of Services; {_ASK_SERVER}",
            TargetKind.NODE: f"the agent knows only its own Node; {_ASK_SERVER}",
            TargetKind.SERVICE: f"the agent knows no headless Services; {_ASK_SERVER}",
        },
        services=objects.services,
        slices=objects.slices,
        nodes=(objects.node,),
        pod_networks=_pod_networks(config),
        here=objects.node.name,
    )


class ServerObjects(NamedTuple):
    """The objects of an API server; `here` is the name of the node whose rules are inspected, "" if unknown.

    Pods are read if the account may list them, else from EndpointSlices.
    """

    config: Config
    here: str

    def directory(self, targets: Sequence[Target]) -> Directory:
        """Ask the API server, for no more than the targets need. Raises ClickException."""
        from pykubeproxy.cli.server_lookup import ON_SERVER, with_targets
        from pykubeproxy.sources import SourceError

        with click_errors(SourceError):
            found = Directory(ON_SERVER, pod_networks=_pod_networks(self.config), here=self.here)
            return with_targets(open_client(self.config), targets, found)


def _only(kind: type[_Object], objects: Iterable[Object]) -> tuple[_Object, ...]:
    return tuple(it for it in objects if isinstance(it, kind))


def _pod_networks(config: Config) -> tuple[str, ...]:
    """Return the cluster CIDRs, which are valid only in this mode."""
    detect = config.detect_local
    return detect.cluster_cidrs if detect.mode is DetectLocalMode.CLUSTER_CIDR else ()


class RuleNames(NamedTuple):
    """The Services that comments in rules name. Rules name no pods and no nodes."""

    rules: NodeRules

    def directory(self, targets: Sequence[Target]) -> Directory:
        """Read the rules. Raises KernelError and ClickException."""
        services: tuple[Service, ...] = ()
        for target in targets:
            if target.kind is TargetKind.SERVICE:
                services = self._services(ServiceFilter(target.namespace, target.name)) or self._services()
        return Directory(
            self.rules.place,
            advice={
                TargetKind.POD: f"rules do not name pods; {_ASK_OTHERS}",
                TargetKind.NODE: f"rules do not name nodes; {_ASK_OTHERS}",
                TargetKind.SERVICE: f"rules name no headless Services; {_ASK_OTHERS}",
            },
            services=services,
        )

    def _services(self, query: ServiceFilter | None = None) -> tuple[Service, ...]:
        tables = self.rules.counted(list(Family), query or ServiceFilter())
        return services_of((ruleset for ruleset, _ in tables), query)
