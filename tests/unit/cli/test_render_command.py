"""`pykubeproxy render`: input for iptables-restore and JSON have the same rules."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from pykubeproxy.cli.render import render
from pykubeproxy.objects import Family
from pykubeproxy.rules.iptables_save import parse
from pykubeproxy.rules.ruleset import ChainKey

OBJECTS = str(Path(__file__).parents[2] / "data" / "manifests" / "explain.yaml")


def rendered(*arguments: str) -> str:
    result = CliRunner().invoke(render, ["-f", OBJECTS, "--hostname-override", "node1", *arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("family", list(Family), ids=lambda it: it.value)
def test_json(family: Family) -> None:
    """The document has all chains and rules of the input."""
    text = rendered("--family", family.value.lower())
    document = json.loads(rendered("--family", family.value.lower(), "-o", "json"))
    assert (document["apiVersion"], document["node"]) == ("pykubeproxy/v1", "node1")
    (told,) = document["families"]
    assert told["family"] == family.value
    chains = {
        ChainKey(table["table"], it["chain"]): tuple(it["rules"])
        for table in told["tables"]
        for it in table["chains"]
    }
    written = parse(family, re.sub("^-[ID] .*$", "", text, flags=re.MULTILINE)).chains
    assert {key: rules for key, rules in chains.items() if key.chain.startswith("KUBE-S")} == {
        key: rules for key, rules in written.items() if key.chain.startswith("KUBE-S")
    }
    assert len(chains) > 10


def test_file_without_objects_is_an_error(tmp_path: Path) -> None:
    """It is what a failed kubectl leaves; an answer from it would say that nothing is served."""
    (tmp_path / "empty.yaml").write_text("")
    result = CliRunner().invoke(render, ["-f", str(tmp_path / "empty.yaml")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "empty.yaml has no Services, EndpointSlices or Nodes; save them with `kubectl get" in result.stderr


def test_node_that_is_not_in_the_files_is_named() -> None:
    result = CliRunner().invoke(render, ["-f", OBJECTS, "--hostname-override", "nod1"])
    assert result.exit_code == 0
    assert (
        result.stderr == "Note: the files have no Node nod1; correct --hostname-override, or add the Node.\n"
    )


def test_both_families() -> None:
    """Without --family, the document has both families."""
    document = json.loads(rendered("-o", "json"))
    assert [it["family"] for it in document["families"]] == ["IPv4", "IPv6"]
