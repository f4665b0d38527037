"""Resolve the service port behind a rule."""

from collections.abc import Iterable

from pykubeproxy.inspect.filter import ServiceFilter, parse_title
from pykubeproxy.inspect.frontends import FrontendRule
from pykubeproxy.inspect.routes import chains_from
from pykubeproxy.objects import Protocol
from pykubeproxy.rules import names
from pykubeproxy.rules.parse import parse_rule
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.ports import PortName


class NameResolver:
    """Find names by the rule's comment, by comments in the chains below, or by the hash in the chain's name.

    A name from elsewhere than the rule's own comment must yield the chain's name. The filter may supply a name that no
    comment has.
    """

    def __init__(self, ruleset: Ruleset, filter_: ServiceFilter) -> None:
        self._ruleset = ruleset
        self._filter = filter_
        self._by_hash: dict[str, PortName] | None = None

    def resolve(self, rule: FrontendRule) -> PortName:
        """Return the service port; if its name is unknown, one named after the chain, without namespace."""
        if rule.title:
            return parse_title(rule.title, rule.protocol)
        hashed = rule.target[-16:]
        for key in chains_from(self._ruleset, rule.target):
            for title in _titles(self._ruleset, key):
                if _hash(name := parse_title(title, rule.protocol)) == hashed:
                    return name
        if self._by_hash is None:
            self._by_hash = {_hash(name): name for name in self._all_names()}
        return self._by_hash.get(hashed, PortName("", rule.target, "", rule.protocol))

    def _all_names(self) -> Iterable[PortName]:
        titles = {title for key in self._ruleset.chains for title in _titles(self._ruleset, key)}
        if self._filter.namespace and self._filter.name:
            titles.add(str(self._filter))
        return (parse_title(title, protocol.value) for title in titles for protocol in Protocol)


def _titles(ruleset: Ruleset, key: ChainKey) -> Iterable[str]:
    """Return the words in a chain's comments that look like names of service ports."""
    if not key.chain.startswith("KUBE-"):
        return ()
    comments = (parse_rule(text).comment for text in ruleset.chains[key] if "/" in text)
    return (word for comment in comments for word in comment.split() if "/" in word)


def _hash(name: PortName) -> str:
    return names.cluster_chain(name).removeprefix(names.CLUSTER_PREFIX)
