"""Limit walks through chains: with several jumps to each next chain, a walk takes exponential time."""


class TooManyRules(Exception):
    """A walk visits too many rules."""


class RuleLimit:
    """Count the rules that walks visit, up to a limit."""

    def __init__(self, most: int) -> None:
        self._left = most

    def count(self, rules: int) -> None:
        """Count rules. Raises TooManyRules."""
        self._left -= rules
        if self._left < 0:
            raise TooManyRules(
                "the chains jump to each other too many times; check where these rules come from"
            )
