"""A Dockerfile as stages of steps. Only what this project's own uses is understood; anything else is an error."""

import json
import re
import shlex
from dataclasses import dataclass, field
from typing import NamedTuple


class Step(NamedTuple):
    """An instruction, its words or its shell command, and the stage that --from names, "" for the build context."""

    instruction: str
    arguments: tuple[str, ...]
    source: str = ""


@dataclass(frozen=True)
class Stage:
    """One stage: what it starts from, its name, and its steps in order."""

    base: str
    name: str
    steps: list[Step] = field(default_factory=list)

    def all(self, instruction: str) -> list[Step]:
        """Its steps of one kind."""
        return [step for step in self.steps if step.instruction == instruction]


def stages(text: str) -> list[Stage]:
    """The stages in order. Raises ValueError for an instruction or a flag that is not understood."""
    known: dict[str, str] = {}
    found: list[Stage] = []
    for line in _lines(text):
        instruction, _, rest = line.partition(" ")
        if instruction == "ARG" and not found:
            name, _, value = rest.strip().partition("=")
            known[name] = value
        elif instruction == "FROM":
            base, _, name = rest.strip().partition(" AS ")
            found.append(Stage(re.sub(r"\$\{(\w+)\}", lambda match: known[match[1]], base), name.strip()))
        elif found:
            found[-1].steps.append(_step(instruction, rest.strip()))
        else:
            raise ValueError(f"{instruction} before the first FROM")
    return found


def _lines(text: str) -> list[str]:
    """Without comments, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [line for line in joined.splitlines() if line.strip()]


def _step(instruction: str, rest: str) -> Step:
    if instruction == "RUN" and not rest.startswith(("--", "[")):
        return Step(instruction, (rest,))
    if instruction in ("ENTRYPOINT", "CMD"):
        return Step(instruction, tuple(json.loads(rest)))
    if instruction in ("ENV", "LABEL"):
        return Step(instruction, tuple(shlex.split(rest)))
    if instruction == "COPY":
        words = shlex.split(rest)
        source = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else ""
        if not any(word.startswith("--") for word in words):
            return Step(instruction, tuple(words), source)
    raise ValueError(f"not understood: {instruction} {rest}")
