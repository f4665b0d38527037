#!/usr/bin/env bash
# Brings up a kind cluster without kube-proxy, with pykubeproxy built from this checkout, and tries it. Takes docker,
# kind and kubectl. A cluster that is there already is used again: run it after every change.
set -euo pipefail

cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. vagrant/versions.env
# shellcheck source=/dev/null
. vagrant/fetch.sh

cluster=kind
image=pykubeproxy:$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' pykubeproxy/__init__.py)
kubectl="kubectl --context kind-$cluster"
downloads=${XDG_CACHE_HOME:-$HOME/.cache}/pykubeproxy
mkdir -p "$downloads"

echo "== the image $image"
docker build --tag "$image" .

if ! kind get clusters | grep -qx "$cluster"; then
    echo "== a cluster without kube-proxy"
    # Nodes become ready, pods with cluster addresses do not: nothing serves Services yet.
    kind create cluster --name "$cluster" --config manifests/overlays/kind/cluster.yaml
fi
kind load docker-image --name "$cluster" "$image"

echo "== pykubeproxy"
$kubectl apply -k manifests/overlays/kind
$kubectl -n kube-system rollout restart daemonset/pykubeproxy
$kubectl -n kube-system rollout status daemonset/pykubeproxy --timeout=180s
$kubectl -n kube-system rollout status deployment/coredns --timeout=180s

echo "== ingress-nginx"
manifest=$downloads/ingress-nginx-$INGRESS_NGINX_VERSION.yaml
[ -f "$manifest" ] || fetch \
    "https://raw.githubusercontent.com/kubernetes/ingress-nginx/$INGRESS_NGINX_VERSION/deploy/static/provider/cloud/deploy.yaml" \
    "$manifest" "$INGRESS_NGINX_SHA256"
$kubectl apply -f "$manifest"
$kubectl -n ingress-nginx rollout status deployment/ingress-nginx-controller --timeout=300s

echo "== the smoke test"
python3 -m vagrant.smoke --context "kind-$cluster"
