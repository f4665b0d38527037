"""The names of service ports, wherever the rules still tell them."""

from collections.abc import Iterable

from pykubeproxy.inspect.frontends import Found
from pykubeproxy.inspect.routes import chains_from
from pykubeproxy.inspect.rule import read
from pykubeproxy.inspect.wanted import Wanted
from pykubeproxy.objects import Protocol
from pykubeproxy.rules import names
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.ports import PortName


class Names:
    """Finds the service port behind a rule: by the rule's comment, by those of its chains, by the chain's hash.

    A name found other than by the rule's own comment has to yield the chain's name, so that no service is taken for
    another. `wanted` may hold a name that no comment has.
    """

    def __init__(self, ruleset: Ruleset, wanted: Wanted) -> None:
        self._ruleset = ruleset
        self._wanted = wanted
        self._by_hash: dict[str, PortName] | None = None

    def of(self, found: Found) -> PortName:
        """The service port; without any trace of its name, one named for the chain, in no namespace."""
        if found.title:
            return _port_name(found.title, found.protocol)
        hashed = found.target[-16:]
        for key in chains_from(self._ruleset, found.target):
            for title in _titles(self._ruleset, key):
                if _hash(name := _port_name(title, found.protocol)) == hashed:
                    return name
        if self._by_hash is None:
            self._by_hash = {_hash(name): name for name in self._known()}
        return self._by_hash.get(hashed, PortName("", found.target, "", found.protocol))

    def _known(self) -> Iterable[PortName]:
        titles = {title for key in self._ruleset.chains for title in _titles(self._ruleset, key)}
        if self._wanted.namespace and self._wanted.name:
            titles.add(str(self._wanted))
        return (_port_name(title, protocol.value) for title in titles for protocol in Protocol)


def _titles(ruleset: Ruleset, key: ChainKey) -> Iterable[str]:
    """Whatever in a chain's comments has the form of a service port's name."""
    if not key.chain.startswith("KUBE-"):
        return ()
    comments = (read(text).comment for text in ruleset.chains[key] if "/" in text)
    return (word for comment in comments for word in comment.split() if "/" in word)


def _port_name(title: str, protocol: str) -> PortName:
    namespace, _, rest = title.partition("/")
    service, _, port = rest.partition(":")
    return PortName(namespace, service, port, protocol)


def _hash(name: PortName) -> str:
    """What the chains of a service port have in common."""
    return names.cluster_chain(name).removeprefix(names.CLUSTER_PREFIX)
