#!/usr/bin/env bash
# Fills in config.conf and api-server.env beside it from the kube-proxy that kubeadm has set up in a cluster: its
# settings are taken as they are, and its kubeconfig tells where the API server is. KUBECTL names another kubectl.
set -euo pipefail
cd "$(dirname "$0")"

kubectl=${KUBECTL:-kubectl}
get() {
    "$kubectl" -n kube-system get configmap kube-proxy -o "go-template={{index .data \"$1\"}}"
}

config=$(get config.conf)
server=$(get kubeconfig.conf | sed -n 's|^ *server: *"\{0,1\}https://\([^"/]*\).*|\1|p')
if [ -z "$server" ] || [[ $config != *KubeProxyConfiguration* ]]; then
    echo "The ConfigMap kube-proxy in kube-system is not one of kubeadm's: fill in the two files by hand." >&2
    exit 1
fi

port=443
if [[ $server =~ :([0-9]+)$ ]]; then
    port=${BASH_REMATCH[1]}
    server=${server%:*}
fi

# The pod's service account is used, with the address in api-server.env. No value below -997 for oomScoreAdj: the
# kubelet gives that, and to go lower would take one more capability.
sed -e 's|^\( *kubeconfig:\).*|\1 ""|' -e 's|^oomScoreAdj:.*|oomScoreAdj: -997|' <<<"$config" >config.conf
grep -q '^oomScoreAdj:' config.conf || echo 'oomScoreAdj: -997' >>config.conf
printf '# Where a node reaches the API server before any Service works.\n%s\n%s\n' \
    "KUBERNETES_SERVICE_HOST=${server//[\[\]]/}" "KUBERNETES_SERVICE_PORT=$port" >api-server.env
echo "config.conf and api-server.env are filled in, for the API server at $server, port $port."
if grep -E '^ *healthzBindAddress:' config.conf | grep -Evq '(""|(0\.0\.0\.0|\[?::]?):10256)"? *$'; then
    echo "Mind healthzBindAddress in config.conf: the pods' probes ask the node's address, port 10256." >&2
fi
