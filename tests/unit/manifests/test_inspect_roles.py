"""The roles for `kubectl pykubeproxy` grant what it does and no more."""

from tests.unit.manifests.overlays import MANIFESTS, Object, read

ROLES = read(MANIFESTS / "inspect/rbac.yaml")


def granted(role: Object) -> set[str]:
    return {
        f"{verb} {resource}"
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_exec_is_granted_in_kube_system_only() -> None:
    """Exec into a proxy's pod equals root, so it is no right in all namespaces."""
    with_exec = [role for role in ROLES if any("pods/exec" in it for it in granted(role))]
    assert [(it["kind"], it["metadata"]["namespace"]) for it in with_exec] == [("Role", "kube-system")]
    assert granted(with_exec[0]) == {"get pods/exec", "create pods/exec"}


def test_reading_changes_nothing() -> None:
    (cluster,) = (it for it in ROLES if it["kind"] == "ClusterRole")
    assert {it.split()[0] for it in granted(cluster)} == {"get", "list"}
    assert {it.split()[1] for it in granted(cluster)} == {"nodes", "pods", "services", "endpointslices"}


def test_debug_pods_have_a_role_of_their_own() -> None:
    (debug,) = (it for it in ROLES if it["metadata"]["name"] == "pykubeproxy-debug")
    assert (debug["kind"], debug["metadata"]["namespace"]) == ("Role", "kube-system")
    assert granted(debug) == {"create pods", "delete pods"}
