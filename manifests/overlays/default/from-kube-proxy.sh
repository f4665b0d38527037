#!/usr/bin/env bash
# Write config.conf and api-server.env in this folder from the ConfigMap of kubeadm's kube-proxy: copy its settings and
# read the API server's address from its kubeconfig. Set KUBECTL to use another kubectl.
set -euo pipefail
cd "$(dirname "$0")"

kubectl=${KUBECTL:-kubectl}
get() {
    "$kubectl" -n kube-system get configmap kube-proxy -o "go-template={{index .data \"$1\"}}"
}

config=$(get config.conf)
server=$(get kubeconfig.conf | sed -n 's|^ *server: *"\{0,1\}https://\([^"/]*\).*|\1|p')
if [ -z "$server" ] || [[ $config != *KubeProxyConfiguration* ]]; then
    echo "the ConfigMap kube-system/kube-proxy does not have kubeadm's form; edit config.conf and api-server.env by hand" >&2
    exit 1
fi

port=443
if [[ $server =~ :([0-9]+)$ ]]; then
    port=${BASH_REMATCH[1]}
    server=${server%:*}
fi

# The agent uses the pod's service account and the address in api-server.env instead of a kubeconfig. The kubelet sets
# oomScoreAdj to -997; a lower value requires CAP_SYS_RESOURCE. The agent has no mode nftables.
sed -e 's|^\( *kubeconfig:\).*|\1 ""|' -e 's|^oomScoreAdj:.*|oomScoreAdj: -997|' \
    -e 's|^mode: *"\{0,1\}nftables.*|mode: ""|' <<<"$config" >config.conf
grep -q '^oomScoreAdj:' config.conf || echo 'oomScoreAdj: -997' >>config.conf
printf '# The address of the API server.\n%s\n%s\n' \
    "KUBERNETES_SERVICE_HOST=${server//[\[\]]/}" "KUBERNETES_SERVICE_PORT=$port" >api-server.env
echo "wrote config.conf and api-server.env for the API server at $server, port $port"
if grep -E '^ *healthzBindAddress: *"?(\[[^]]*]|[0-9.]*):[0-9]+"? *$' config.conf | grep -vq ':10256"\? *$'; then
    echo "warning: healthzBindAddress in config.conf must have port 10256, which the pods' probes use" >&2
fi
case $(sed -n 's|^mode: *"\{0,1\}\([a-z]*\).*|\1|p' <<<"$config") in
nftables) echo "changed mode: nftables to mode: \"\"; move settings under nftables to iptables" ;;
ipvs) echo "warning: kube-proxy runs in ipvs mode; change it to iptables mode first, and set mode: \"\"" >&2 ;;
esac
