#!/usr/bin/env bash
# List the ConfigMaps of pykubeproxy that neither its DaemonSet nor a kept revision of it refers to. kustomize creates a
# ConfigMap for each new configuration and deletes none. `kubectl rollout undo` needs those of the kept revisions
# (revisionHistoryLimit), so they are not listed. Run this after a rollout. Set KUBECTL to use another kubectl. To delete:
#   manifests/unused-config-maps.sh | xargs -r kubectl -n kube-system delete
set -euo pipefail

kubectl=${KUBECTL:-kubectl}
get() {
    "$kubectl" -n kube-system get "$@"
}

name=app.kubernetes.io/name=pykubeproxy
pod=.spec.template.spec
names="{$pod.volumes[*].configMap.name} {$pod.containers[*].envFrom[*].configMapRef.name}"
# Without a DaemonSet this fails, so that nothing is listed.
current=$(get daemonset pykubeproxy -o "jsonpath=$names")
kept=$(get controllerrevisions -l "$name" -o "jsonpath={range .items[*]}${names//$pod/.data$pod} {end}")
found=$(get configmaps -l "$name,app.kubernetes.io/component=service-proxy" -o 'jsonpath={.items[*].metadata.name}')
for config_map in $found; do
    [[ " $current $kept " == *" $config_map "* ]] || echo "configmap/$config_map"
done
