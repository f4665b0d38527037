"""Limit walks through chains: with several jumps to each next chain, a walk takes exponential time."""


class TooManyRules(Exception):
    """A walk visits too many rules."""


class RuleLimit:
    """Count the rules that walks visit.

    They may visit `least` rules, and `times` more for each different rule on their way, but no more than `most` in all.
    So the time follows from the number of rules.
    """

    def __init__(self, most: int, least: int = 0, times: int = 0) -> None:
        self._most, self._allowed, self._times = most, min(least or most, most), times
        self._counted = 0
        self._entered: set[object] = set()

    def enter(self, chain: object, rules: int) -> None:
        """Count the rules of a chain. Raises TooManyRules."""
        if chain not in self._entered:
            self._entered.add(chain)
            self._allowed = min(self._allowed + rules * self._times, self._most)
        self.count(rules)

    def count(self, rules: int) -> None:
        """Count rules. Raises TooManyRules."""
        self._counted += rules
        if self._counted > self._allowed:
            raise TooManyRules(
                "the chains jump to each other too many times; check where these rules come from"
            )
