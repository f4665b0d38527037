#!/usr/bin/env bash
# Installs what `make dist` has built, the wheel and the sdist, each into an environment of its own with nothing else
# in it, runs it there, and prints what is to be published.
set -eu
cd "$(dirname "$0")/../.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/objects.yaml" <<'YAML'
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {type: ClusterIP, clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{port: 80, protocol: TCP}]}
YAML

for file in dist/*; do
    python=$(tests/setup/python.sh)
    "$python" -m venv --clear "$folder/venv"
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$file"
    # From elsewhere, so that nothing of this checkout is imported.
    (cd "$folder" && venv/bin/pykubeproxy --version &&
        venv/bin/pykubeproxy render -f objects.yaml --hostname-override node1 >rules &&
        grep -q 'has no endpoints' rules)
done
sha256sum dist/*
