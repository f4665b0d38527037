#!/usr/bin/env bash
# Installs the Debian packages that are missing here: what the proxy works with, what python-iptables is built with,
# and what the tests and the lab use. Asks for nothing when all of them are there.
set -eu

wanted=(
    iptables nftables iproute2 conntrack procps # the proxy, its lab and its tests
    python3 python3-venv python3-dev gcc libc6-dev # python-iptables comes as source
    curl                                        # the examples of the documentation
    git shellcheck                              # make lint
    debootstrap                                 # the image, made without a container engine
)
missing=()
for package in "${wanted[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

echo "Installing ${missing[*]}"
root=()
[ "$(id -u)" = 0 ] || root=(sudo)
export DEBIAN_FRONTEND=noninteractive
"${root[@]}" apt-get update -qq
"${root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
