"""Generate the reference pages and a picture from the code: `python -m tests.docs.reference`."""

import copy
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator

import click

from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.bundle import layout
from pykubeproxy.cli import main
from pykubeproxy.cli.flags import topic_of
from pykubeproxy.cli.help import Topic
from pykubeproxy.cli.kubectl import plugin
from pykubeproxy.config import ACTIONS, SETTINGS, Setting
from pykubeproxy.config.kinds import BOOL
from pykubeproxy.config.table import Zero
from pykubeproxy.inspect.connection import TracedDestination
from pykubeproxy.inspect.trace.svg import svg
from pykubeproxy.report.document import Report
from pykubeproxy.services.ports import FrontendKind
from tests.docs import json_reference
from tests.docs.pages import DOCS
from tests.docs.states import states_of_tables
from tests.fakes.three_nodes import ThreeNodes

_MARK = "<!-- Generated from the code by `make docs`. Do not edit: changes are overwritten. -->"
_ZERO = {
    Zero.COUNTS: "",
    Zero.DEFAULT_IN_FILE: "in a file, {} means the default",
    Zero.DEFAULT: "{} means the default",
}
_CONFIGURATION = f"""# Configuration reference

{_MARK}

pykubeproxy reads kube-proxy's configuration file, a `KubeProxyConfiguration` of `kubeproxy.config.k8s.io/v1alpha1`, and
accepts kube-proxy's flags. pykubeproxy's own settings are under the key `pykubeproxy:` of the same file.

```yaml
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clusterCIDR: 10.244.0.0/16
iptables:
  minSyncPeriod: 1s
pykubeproxy:
  iptablesBackend: auto
  dispatch: auto
```

**File and flags.** With `--config`, flags have no effect, as with kube-proxy, except those marked *also with a file*,
which override the file.

**Changes.** The agent reads the configuration only when it starts. When a program writes another text to the file, or
replaces it by a rename, the agent exits with code 1, and its supervisor restarts it. With the manifests, a changed configuration restarts
the agents, some nodes at a time, as described in [operations](../operations/index.md#change-the-configuration).

**Newer files and mistakes.** The agent ignores what it can do without, logs `configuration warning`, and starts. So an
older agent starts with the file of a newer one. It exits if a default might misdirect packets:

| in the file | the agent |
| --- | --- |
| an unknown or misspelt field | ignores it and logs a warning, as kube-proxy does |
| an invalid value of a setting without effect (but for `showHiddenMetricsForVersion`), or of one marked *an invalid value is a warning* | ignores it and logs a warning; the default counts |
| an invalid value of any other setting, such as an unknown `mode`, `detectLocalMode` or `iptablesBackend` | exits at its start with one line that names the field and the valid values |
| another `kind` or `apiVersion` (keys in any case), a section that is not a mapping, text that is not YAML | exits at its start with one line that gives the reason |

An unknown flag is an error, and so is an invalid value of a flag that has an effect.

**Values.** The agent accepts the values that kube-proxy accepts. Scalars follow the YAML rules of kubectl and kube-proxy:
`yes` and `on` are booleans, `010` is eight, and `8.0` is a whole number. Only the first document counts. A file that
starts with `{{` is JSON, where `8.0` is not a whole number. Durations have Go's format, with a unit: `500ms`, `30s`,
`1h30m`. IP addresses may have leading zeros: `010.0.0.0/8` is `10.0.0.0/8`. Where 0 or an empty value means the default,
the entry says so; kubeadm writes such values into its ConfigMap.

A running agent shows its configuration at `http://127.0.0.1:10249/configz` and its flags at `/flagz`, with values as given.
`pykubeproxy run --write-config-to FILE` writes the configuration file for the given flags.
"""
_COMMANDS = f"""# Commands

{_MARK}

The `--help` of each command. Commands that need the configuration accept the flags of [`run`](#pykubeproxy-run) too;
`--help-all` shows them. [Configuration](configuration.md) explains them.

## Exit codes

| code | meaning |
| --- | --- |
| 0 | answered, and nothing differs or is wrong |
| 1 | answered, and something differs or is wrong: only `diff`, `check`, `status`, `lab demo`, and `trace --live`, which also exits with 3 if rules and reality differ |
| 2 | not answered: wrong usage or a failure |
| 130 | ended by Ctrl-C; `dump-rules --watch` and `lab demo --keep`, which end by it, exit with 0 |
| 141 | ended because nobody reads its output any more, as in a pipe to `head` |

`run` and `cleanup` exit with 1 for a failure, as kube-proxy does, and with 2 for wrong usage, where kube-proxy exits with 1
too. `run --once` exits with 3 if another pykubeproxy runs on the node.

Output has colors only on a terminal; set `NO_COLOR` to turn them off.
"""
_METRICS = f"""# Metrics

{_MARK}

The agent serves these metrics at `http://127.0.0.1:10249/metrics` (`metricsBindAddress`). kube-proxy's metrics keep their
names and stability level, so panels and alerts about them work unchanged; those of its libraries
[are missing](../differences.md#missing). The names of additional metrics begin with `pykubeproxy_`. Counters start at 0;
other metrics with labels appear with their first sample. Durations are in seconds, times in seconds since 1970. The agent also serves most of the usual
`process_*` metrics.

`/metrics/slis` has `kubernetes_healthcheck` and `kubernetes_healthchecks_total`, which count requests of `/healthz` on the
same address. Responses are compressed for clients that accept gzip.
"""
_JSON = f"""# JSON output

{_MARK}

With `-o json`, commands print a JSON document of version `pykubeproxy/v1`. Later releases may add keys and reasons to this
version, but do not change the meaning of existing ones. If an entry has both, `reason` is for programs and stable, and
`message` is for people. Each report has an `apiVersion`, a `kind`, a JSON Schema and an example, in which lists end after two
entries and long texts after 200 characters. `-o yaml` prints the same as YAML.
"""
_BUNDLE = f"""# Bundles

{_MARK}

A bundle is one file with the rules, settings and objects of a node. `pykubeproxy bundle` makes it on the node;
`dump-rules`, `trace`, `diff`, `explain` and `status` read it with `--bundle`, on any machine.

It is a tar, compressed with gzip, of one folder `pykubeproxy-bundle-NODE-TIME`. A bundle may lack any file but the
manifest. Readers ignore unknown files, so later versions may add some, and folders, so a bundle that was unpacked and
packed again is one too. A reader refuses a bundle with a higher `format` than it knows.

## Files
"""
_NOT_IN_BUNDLE = """## What a bundle does not have

- no Secrets, tokens, keys or passwords: the configuration names a kubeconfig, whose contents are not read; user and
  password of URLs are removed wherever they occur
- no annotations, labels or other text of objects, only the fields that decide about rules
- without `--flows`, no addresses from connection tracking but those of Services, with numbers of connections
- no environment, command lines, logs, or contents of pods

It does have the names and addresses of Services, pods, nodes and interfaces, and the zones of endpoints. It has all
rules of other programs with their comments, in which people may have written anything: look through them before you
publish a bundle.

## Manifest
"""


def configuration() -> str:
    """Return docs/reference/configuration.md."""
    effective = [setting for setting in SETTINGS if setting.attribute]
    parts = [_CONFIGURATION]
    for topic in Topic:
        if entries := [_entry(setting) for setting in effective if topic_of(setting) is topic]:
            parts += [f"## {topic}\n", *entries]
    parts.append("## Flags without a field\n\nOnly `pykubeproxy run` has these flags.\n")
    actions = ((f"`--{setting.flag}`", setting.help) for setting in ACTIONS)
    parts.append(_table(("flag", "meaning"), actions))
    parts.append("## Deprecated flags\n")
    deprecated = [setting for setting in SETTINGS if setting.instead]
    replaced = ((f"`--{setting.flag}`", f"`--{setting.instead}`", setting.help) for setting in deprecated)
    parts.append(_table(("flag", "use instead", "meaning"), replaced))
    parts.append(
        "## Settings without effect\n\nThese settings belong to other proxy modes, other operating systems or Go's"
        " logging. pykubeproxy accepts and ignores them.\n"
    )
    without_effect = [setting for setting in SETTINGS if setting.ignored]
    ignored = ((_code(setting.field), _code(setting.flag, "--"), setting.help) for setting in without_effect)
    parts.append(_table(("field", "flag", "meaning"), ignored))
    return "\n".join(parts)


def _entry(setting: Setting) -> str:
    default = setting.kind.text(setting.default)
    facts = [
        f"flag `--{setting.flag}`" * bool(setting.flag),
        "`true` or `false`" if setting.kind is BOOL else f"`{setting.kind.name}`",
        "no default" if default in ("", "[]") else f"default `{default}`",
        "*also with a file*" * setting.beside_config,
        "*an invalid value is a warning*" * setting.optional,
        _ZERO[setting.zero].format("empty" if setting.kind.textual else "0") * (default not in ("", "[]")),
    ]
    line = " · ".join(fact for fact in facts if fact)
    return f"### `{setting.field or f'--{setting.flag}'}`\n\n{setting.help}\n\n{line}\n"


def commands() -> str:
    """Return docs/reference/commands.md."""
    parts = [_COMMANDS]
    programs = (walk(main, ("pykubeproxy",)), walk(plugin, ("kubectl", "pykubeproxy")))
    for path, command in itertools.chain(*programs):
        parts.append(f"## {' '.join(path)}\n")
        parts.append(f"```text\n{_help(path, command)}\n```\n")
    return "\n".join(parts)


def walk(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the path and the object of each command of a group, and of its groups."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from walk(command, (*path, name))


def _help(path: tuple[str, ...], command: click.Command) -> str:
    """Return the help of a command."""
    command = copy.copy(command)
    command._help_option = None  # click caches the option of the first caller, which may be another test
    context = command.context_class(
        command, info_name=" ".join(path), terminal_width=100, help_option_names=["-h", "--help"]
    )
    return command.get_help(context)


def metrics() -> str:
    """Return docs/reference/metrics.md."""
    families = Metrics(lambda _: 0).registry.collect()
    ours = sorted(
        (metric for metric in families if not metric.name.startswith("process_")),
        key=lambda metric: (metric.type, metric.name),
    )
    parts = [_METRICS]
    for kind, metrics in itertools.groupby(ours, lambda metric: metric.type):
        suffix = "_total" if kind == "counter" else ""
        rows = (
            (f"`{metric.name}{suffix}`", _labels(metric.name), f"{metric.documentation}.")
            for metric in metrics
        )
        parts.append(f"## {kind.capitalize()}s\n")
        parts.append(_table(("name", "labels", "meaning"), rows))
    return "\n".join(parts)


def _labels(name: str) -> str:
    """Return the labels of a metric; only the registry's private record has them before the first sample."""
    metric = Metrics(lambda _: 0).registry._names_to_collectors.get(name)
    labels: Iterable[str] = getattr(metric, "_labelnames", ())
    return ", ".join(f"`{label}`" for label in labels)


def json_forms() -> str:
    """Return docs/reference/json.md, from the types of reports."""
    return "\n".join([_JSON, *json_reference.pages()])


def bundle() -> str:
    """Return docs/reference/bundle.md."""
    rows = ((f"`{name}`", f"{text[0].upper()}{text[1:]}.") for name, text in layout.FILES.items())
    manifest = json_reference.section(layout.Manifest)
    return "\n".join([_BUNDLE, _table(("file", "what it holds"), rows), _NOT_IN_BUNDLE, *manifest])


def _code(text: str, prefix: str = "") -> str:
    return f"`{prefix}{text}`" if text else ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", r"\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def traced_path() -> str:
    """Return docs/assets/trace.svg: a pod connects to a Service of which it is an endpoint."""
    to = TracedDestination("TCP", "10.96.1.1", 80, "ns1/web:http", FrontendKind.CLUSTER_IP)
    return svg(ThreeNodes("clusterip-three").trace("10.244.1.11", to), wide=False)


def _schema(report: type[Report]) -> str:
    return json.dumps(json_reference.schema(report), indent=2, ensure_ascii=False) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "reference/configuration.md": configuration,
    "reference/commands.md": commands,
    "reference/metrics.md": metrics,
    "reference/json.md": json_forms,
    "reference/bundle.md": bundle,
    "assets/trace.svg": traced_path,
    "assets/work.svg": states_of_tables,
    **{
        f"reference/schemas/{json_reference.kind_of(report)}.json": functools.partial(_schema, report)
        for report in json_reference.REPORTS
    },
}


def write() -> None:
    """Write all generated pages and pictures."""
    (DOCS / "reference").mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(make())


if __name__ == "__main__":
    write()
