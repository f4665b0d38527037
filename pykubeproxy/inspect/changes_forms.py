"""Changes as text: in words, as a unified diff of rules, and as a document for programs."""

import difflib
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import click

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.changes import Changes, PolicyChange, ServiceChange
from pykubeproxy.inspect.changes_words import about, words
from pykubeproxy.inspect.dump import EndpointView
from pykubeproxy.inspect.forms import TIE, WIDTH
from pykubeproxy.rules.difference import ChainDifference

# How many rules that stay are shown around those that change.
_CONTEXT = 3
_COLORS = {"+": "green", "-": "red", "@": "cyan"}


def in_words(changes: Sequence[Changes], before: str, after: str) -> str:
    """The changes of each family in words, at most 80 columns wide; empty if there are none.

    `before` and `after` say what is compared.
    """
    return "\n".join(
        "".join(f"{line}\n" for line in _family_in_words(it, before, after)) for it in changes if it.chains
    )


def unified(changes: Sequence[Changes], before: str, after: str) -> str:
    """The changes of each family as a unified diff, chain by chain; empty if there are none."""
    return "".join(
        f"{line}\n"
        for it in changes
        if it.chains
        for line in (
            click.style(f"--- {before}, {it.family.value}", bold=True),
            click.style(f"+++ {after}, {it.family.value}", bold=True),
            *(line for chain in it.chains for line in _hunks(chain)),
        )
    )


def document(changes: Sequence[Changes], before: str, after: str) -> dict[str, object]:
    """The changes as a document for JSON, of version pykubeproxy/v1.

    {"apiVersion", "before", "after": what was compared, "different": bool,
     "services": [{"namespace", "name", "port", "protocol", "family", "change": "new", "gone" or "changed",
      "policies": [{"policy", "verdictBefore", "verdictAfter": "dnat", "reject", "drop", "pass" or null,
        "endpointsGone", "endpointsNew": [{"address", "port", "share": 0 to 1}],
        "sharesChanged": [{"address", "port", "before", "after"}]}],
      "words": [sentence]}],
     "chains": [{"family", "table", "chain", "change", "gone": [rule], "new": [rule]}],
     "words": [sentence], those about services among them}

    A service that changes without policies has other rules that lead to the same endpoints on the same terms. A chain
    that changes with no rule gone or new has them in another order. More keys may be added.
    """
    return {
        "apiVersion": API_VERSION,
        "before": before,
        "after": after,
        "different": any(it.chains for it in changes),
        "services": [
            {**_service(service), "family": it.family.value} for it in changes for service in it.services
        ],
        "chains": [{"family": it.family.value, **_chain(chain)} for it in changes for chain in it.chains],
        "words": [_plain(sentence) for it in changes for sentence in words(it)],
    }


def _family_in_words(changes: Changes, before: str, after: str) -> Iterator[str]:
    yield click.style(f"{changes.family.value}: {before} → {after}", bold=True)
    for sentence in words(changes):
        lines = textwrap.wrap(
            sentence,
            WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        yield from map(_plain, lines)


def _hunks(it: ChainDifference) -> Iterator[str]:
    """A chain's part of a unified diff; the places in it are rules, not lines."""
    state = " (new)" if it.before is None else " (gone)" if it.after is None else ""
    title = f"{it.key.table} {it.key.chain}{state}"
    matcher = difflib.SequenceMatcher(None, it.before or (), it.after or (), autojunk=False)
    groups = [*matcher.get_grouped_opcodes(_CONTEXT)]
    if not groups:
        yield _colored(f"@@ {title} @@")
    for group in groups:
        old, new = _range(group[0][1], group[-1][2]), _range(group[0][3], group[-1][4])
        yield _colored(f"@@ -{old} +{new} @@ {title}")
        for kind, start, end, new_start, new_end in group:
            if kind == "equal":
                yield from (f" {rule}" for rule in (it.before or ())[start:end])
            else:
                yield from (_colored(f"-{rule}") for rule in (it.before or ())[start:end])
                yield from (_colored(f"+{rule}") for rule in (it.after or ())[new_start:new_end])


def _range(start: int, end: int) -> str:
    """As unified diffs have it: the first place, counted from 1, and how many; of none the place before."""
    return f"{start + 1 if end > start else start},{end - start}"


def _colored(line: str) -> str:
    return click.style(line, fg=_COLORS[line[0]])


def _plain(text: str) -> str:
    return text.replace(TIE, " ")


def _service(change: ServiceChange) -> dict[str, object]:
    return {
        "namespace": change.name.namespace,
        "name": change.name.service,
        "port": change.name.port,
        "protocol": change.name.protocol,
        "change": _state(*change.present),
        "policies": [_policy(policy) for policy in change.policies],
        "words": [_plain(sentence) for sentence in about(change)],
    }


def _policy(change: PolicyChange) -> dict[str, object]:
    return {
        "policy": change.policy.value,
        "verdictBefore": change.before and change.before.verdict.value,
        "verdictAfter": change.after and change.after.verdict.value,
        "endpointsGone": _endpoints(change.gone),
        "endpointsNew": _endpoints(change.new),
        "sharesChanged": [
            {
                "address": old.address,
                "port": old.port,
                "before": round(old.share, 9),
                "after": round(new.share, 9),
            }
            for old, new in change.reweighted
        ],
    }


def _endpoints(endpoints: Iterable[EndpointView]) -> list[dict[str, object]]:
    return [{"address": it.address, "port": it.port, "share": round(it.share, 9)} for it in endpoints]


def _chain(it: ChainDifference) -> dict[str, object]:
    return {
        "table": it.key.table,
        "chain": it.key.chain,
        "change": _state(it.before is not None, it.after is not None),
        "gone": list(it.gone),
        "new": list(it.new),
    }


def _state(before: bool, after: bool) -> str:
    return "changed" if before and after else "new" if after else "gone"
