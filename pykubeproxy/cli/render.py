"""`pykubeproxy render`: print the rules for objects in files."""

from pykubeproxy.cli.emit import DOCUMENTS, emit, emit_rules
from pykubeproxy.cli.flags import (
    CONTEXT_SETTINGS,
    choice_option,
    config_options,
    family_option,
    node_address_option,
    read_config,
)
from pykubeproxy.cli.help import OUTPUT, SOURCE, command, option
from pykubeproxy.cli.sources import objects_in_files, read_errors
from pykubeproxy.cli.terminal import echo_notes
from pykubeproxy.inspect.dump.render_rules import RenderReport
from pykubeproxy.nodes.objects import context_of
from pykubeproxy.objects import Family
from pykubeproxy.rules.render import full_input
from pykubeproxy.rules.render import render as render_rules


@command(context_settings=CONTEXT_SETTINGS, short_help="Print the rules for objects in files.")
@option(
    "-f",
    "--filename",
    required=True,
    metavar="PATH",
    help='Read objects from a YAML or JSON file, a folder or "-".',
    group=SOURCE,
)
@family_option
@node_address_option
@choice_option(
    "-o",
    "--output",
    choices=("rules", *DOCUMENTS),
    help="Output format; rules is input for iptables-restore.",
    group=OUTPUT,
)
@config_options
@read_errors()
def render(
    filename: str,
    families: tuple[Family, ...],
    addresses: tuple[str, ...],
    output: str,
    flags: dict[str, object],
) -> None:
    """Print the iptables-restore input for the Services, EndpointSlices and Nodes in PATH.

    Render for the Node named by --hostname-override, or else the only Node in PATH. This needs neither root nor a
    network, and leaves the tables of this machine alone.

    \b
    pykubeproxy render -f objects.yaml --hostname-override node1 -o json
    kubectl get services,endpointslices -A -o yaml | pykubeproxy render -f -
    """
    config = read_config(flags)
    known = objects_in_files(filename, config)
    echo_notes({"": known.remarks})
    contexts = [context_of(config, known.node, family, addresses) for family in families]
    rulesets = [render_rules(known.cluster, context) for context in contexts]
    if output in DOCUMENTS:
        emit(RenderReport.of(rulesets, known.node.name), output)
        return
    programs = {Family.IPV4: "iptables-restore", Family.IPV6: "ip6tables-restore"}
    emit_rules(
        (
            f"{ruleset.family.value}, for {programs[ruleset.family]} --noflush",
            full_input(ruleset, context.options),
        )
        for ruleset, context in zip(rulesets, contexts, strict=True)
    )
