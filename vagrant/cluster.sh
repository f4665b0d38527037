#!/usr/bin/env bash
# Create a kind cluster without kube-proxy, deploy pykubeproxy built from this checkout, and run the smoke test. Needs
# docker, kind and kubectl. Run it again after a change; it reuses an existing cluster.
set -euo pipefail

cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. vagrant/versions.env
# shellcheck source=/dev/null
. vagrant/fetch.sh

cluster=kind
image=localhost/pykubeproxy:$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' pykubeproxy/__init__.py)
kubectl="kubectl --context kind-$cluster"
downloads=${XDG_CACHE_HOME:-$HOME/.cache}/pykubeproxy
mkdir -p "$downloads"

echo "== build the image $image"
docker build --tag "$image" .

if ! kind get clusters | grep -qx "$cluster"; then
    echo "== create a cluster without kube-proxy"
    # Nodes become ready now; pods that use Services become ready only after pykubeproxy runs.
    kind create cluster --name "$cluster" --config manifests/overlays/kind/cluster.yaml
fi
kind load docker-image --name "$cluster" "$image"

echo "== deploy pykubeproxy"
$kubectl apply -k manifests/overlays/kind
$kubectl -n kube-system rollout restart daemonset/pykubeproxy
$kubectl -n kube-system rollout status daemonset/pykubeproxy --timeout=180s
$kubectl -n kube-system rollout status deployment/coredns --timeout=180s

echo "== deploy ingress-nginx"
manifest=$downloads/ingress-nginx-$INGRESS_NGINX_VERSION.yaml
[ -f "$manifest" ] || fetch \
    "https://raw.githubusercontent.com/kubernetes/ingress-nginx/$INGRESS_NGINX_VERSION/deploy/static/provider/cloud/deploy.yaml" \
    "$manifest" "$INGRESS_NGINX_SHA256"
$kubectl apply -f "$manifest"
$kubectl -n ingress-nginx rollout status deployment/ingress-nginx-controller --timeout=300s

echo "== run the smoke test"
python3 -m vagrant.smoke --context "kind-$cluster"
