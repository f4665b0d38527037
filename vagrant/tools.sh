#!/usr/bin/env bash
# Install docker, kind and kubectl on a Debian machine. Run as root; installed versions are not downloaded again.
set -euo pipefail

here=/project/vagrant
[ -d "$here" ] || here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=/dev/null
. "$here/versions.env"
# shellcheck source=/dev/null
. "$here/fetch.sh"

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends ca-certificates curl docker.io python3 >/dev/null
if id vagrant >/dev/null 2>&1; then
    usermod --append --groups docker vagrant
fi
# kind's nodes need many inotify watches.
printf 'fs.inotify.max_user_instances=512\nfs.inotify.max_user_watches=524288\n' >/etc/sysctl.d/60-kind.conf
sysctl --quiet --load=/etc/sysctl.d/60-kind.conf

architecture=$(dpkg --print-architecture)
install_tool() {
    local name=$1 version=$2 url=$3 sha256=$4
    if [ "$(cat "/usr/local/share/$name.version" 2>/dev/null)" = "$version" ]; then
        return
    fi
    fetch "$url" "/usr/local/bin/$name" "$sha256"
    chmod 0755 "/usr/local/bin/$name"
    echo "$version" >"/usr/local/share/$name.version"
    echo "installed $name $version"
}
kind_sha=KIND_SHA256_$architecture
kubectl_sha=KUBECTL_SHA256_$architecture
install_tool kind "$KIND_VERSION" \
    "https://kind.sigs.k8s.io/dl/$KIND_VERSION/kind-linux-$architecture" "${!kind_sha}"
install_tool kubectl "$KUBECTL_VERSION" \
    "https://dl.k8s.io/release/$KUBECTL_VERSION/bin/linux/$architecture/kubectl" "${!kubectl_sha}"
