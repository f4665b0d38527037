#!/usr/bin/env bash
# Install the wheel and the sdist of `make dist`, each into an empty virtual environment, run them there, and print the
# hashes of all files.
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

for file in dist/*.whl dist/*.tar.gz; do
    python=$(tests/setup/python.sh)
    "$python" -m venv --clear "$folder/venv"
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$file"
    # Run in another folder, so that Python does not import this checkout.
    (cd "$folder" && venv/bin/pykubeproxy --version &&
        venv/bin/pykubeproxy render -f objects.yaml --hostname-override node1 >rules &&
        grep -q 'has no endpoints' rules)
done
sha256sum dist/*
