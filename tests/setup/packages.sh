#!/usr/bin/env bash
# Install missing Debian packages: the tools that the proxy calls, the build dependencies of python-iptables, and the
# tools of the tests and the lab. Root access is not needed if all packages are installed.
set -eu

packages=(
    iptables nftables iproute2 conntrack procps # the proxy, the lab and the tests
    python3 python3-venv python3-dev gcc libc6-dev # python-iptables is built from source
    curl                                        # the examples in the documentation
    git shellcheck groff-base                   # make lint, and the tests of man pages
    podman debootstrap                          # make image
)
# Docker brings a runc of its own. Debian's package would remove Docker.
command -v runc >/dev/null || packages+=(runc)
missing=()
for package in "${packages[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

echo "Installing ${#missing[@]} Debian packages and what they need, in about a minute: ${missing[*]}"
root=()
[ "$(id -u)" = 0 ] || root=(sudo)
export DEBIAN_FRONTEND=noninteractive
"${root[@]}" apt-get update -qq
"${root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
