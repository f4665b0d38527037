"""Write the JSON of nftables rules as text, as `nft list ruleset` does; of long sets only the first elements."""

from collections.abc import Mapping, Sequence

from pykubeproxy.rules.nft_list import Json, NftRule

_MOST_ELEMENTS = 4
# Keys of meta that nft prints without that word.
_BARE = ("iif", "iifname", "iifgroup", "oif", "oifname", "oifgroup")
_OPERATORS = ("&", "|", "^", "<<", ">>")
_VERDICTS = ("accept", "drop", "return", "continue", "notrack")
_NAT = ("dnat", "snat", "masquerade", "redirect", "tproxy")


def rule_text(rule: NftRule) -> str:
    """Return a rule with its comment."""
    words = [statement_text(statement) for statement in rule.statements]
    if rule.comment:
        words.append(f'comment "{rule.comment}"')
    return " ".join(filter(None, words))


def statement_text(statement: Mapping[str, Json]) -> str:
    """Return one statement of a rule; of a kind that is not known, its JSON name and values."""
    for kind, value in statement.items():
        match kind, value:
            case "match", {"op": op, "left": left, "right": right}:
                explicit = op not in ("==", "in") or (isinstance(left, Mapping) and "&" in left)
                operator = f" {op}" if explicit else ""
                return f"{expression_text(left)}{operator} {_beside(left, right)}"
            case "vmap", {"key": key, "data": data}:
                return f"{expression_text(key)} vmap {_beside(key, data)}"
            case "mangle", {"key": key, "value": to}:
                return f"{expression_text(key)} set {_beside(key, to)}"
            case (("jump" | "goto"), {"target": str(target)}):
                return f"{kind} {target}"
            case "reject", {"type": "tcp reset"}:
                return "reject with tcp reset"
            case "reject", {"type": str(family), "expr": str(code)}:
                return f"reject with {family} {code}"
            case "set", {"op": str(op), "elem": element, "set": str(name)}:
                return f"{op} {name} {{ {expression_text(element)} }}"
            case "counter", str(name):
                return f"counter name {name}"
            case "counter", _:
                return "counter"
            case "limit", {"rate": rate, "per": str(per), **rest}:
                return f"limit rate {'over ' if rest.get('inv') else ''}{rate}/{per}"
            case (("quota" | "ct count"), {"val": number, **rest}):
                words = (kind, "over" if rest.get("inv") else "", str(number), str(rest.get("val_unit", "")))
                return " ".join(filter(None, words))
            case "log", {"prefix": str(prefix)}:
                return f'log prefix "{prefix}"'
            case _ if kind in _NAT:
                return _translation(kind, value)
            case _, Mapping() if kind not in _VERDICTS:
                return " ".join([kind, *(f"{key} {expression_text(one)}" for key, one in value.items())])
    return next(iter(statement), "")


def _translation(kind: str, value: Json) -> str:
    if not isinstance(value, Mapping):
        return kind
    family = f" {value['family']}" if "family" in value else ""
    port = f":{expression_text(value['port'])}" if "port" in value else ""
    to = f"{expression_text(value['addr']) if 'addr' in value else ''}{port}"
    flags = value.get("flags", ())
    listed = flags if isinstance(flags, str) else ",".join(map(str, flags)) if isinstance(flags, list) else ""
    return " ".join(filter(None, [f"{kind}{family}", f"to {to}" if to else "", listed]))


def expression_text(value: Json) -> str:
    """Return an expression: a field of packets, a value, a set, or what is computed of them."""
    match value:
        case bool():
            return "exists" if value else "missing"
        case None | int() | float() | str():
            return str(value)
        case {"payload": {"protocol": str(protocol), "field": str(field)}}:
            return f"{protocol} {field}"
        case {"meta": {"key": str(key)}}:
            return key if key in _BARE else f"meta {key}"
        case {"ct": {"key": str(key), **rest}}:
            return " ".join(["ct", *map(str, rest.values()), key])
        case {"fib": {"result": str(result), "flags": flags}}:
            of = flags if isinstance(flags, str) else " . ".join(map(str, flags or ()))  # type: ignore[arg-type]
            return f"fib {of} {result}"
        case {"numgen": {"mode": mode, "mod": mod}}:
            return f"numgen {mode} mod {mod}"
        case {"jhash": {"mod": mod, "expr": of}}:
            return f"jhash {expression_text(of)} mod {mod}"
        case {"map": {"key": key, "data": data}}:
            return f"{expression_text(key)} map {_beside(key, data)}"
        case {"prefix": {"addr": address, "len": length}}:
            return f"{address}/{length}"
        case {"range": [first, last]}:
            return f"{first}-{last}"
        case {"concat": list(parts)}:
            return " . ".join(map(expression_text, parts))
        case {"elem": {"val": element}}:
            return expression_text(element)
        case {"set": list(elements)}:
            return _elements(elements)
        case Mapping():
            return _other(value)
        case Sequence():
            return ",".join(map(expression_text, value))
    return str(value)


def _other(value: Mapping[str, Json]) -> str:
    """Return an operation, a verdict in a map, or an expression of a kind that is not known."""
    for kind, operands in value.items():
        if kind in _OPERATORS and isinstance(operands, list) and operands:
            first, *others = operands
            return f" {kind} ".join([expression_text(first), *(_beside(first, other) for other in others)])
        if isinstance(operands, Mapping) and kind not in ("jump", "goto"):
            return " ".join([kind, *map(expression_text, operands.values())])
    return statement_text(value)


def _elements(elements: Sequence[Json]) -> str:
    shown = [
        " : ".join(map(expression_text, one)) if isinstance(one, list) else expression_text(one)
        for one in elements[:_MOST_ELEMENTS]
    ]
    more = ["…"] if len(elements) > _MOST_ELEMENTS else []
    return f"{{ {', '.join([*shown, *more])} }}"


def _beside(field: Json, value: Json) -> str:
    """Return a value that is compared with a field or written to it: names of interfaces in quotes, marks in hex."""
    text = expression_text(field)
    if isinstance(value, int) and not isinstance(value, bool) and "mark" in text:
        return f"{value:#x}"
    if isinstance(value, str) and text in _BARE:
        return f'"{value}"'
    return expression_text(value)
