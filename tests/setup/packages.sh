#!/usr/bin/env bash
# Install the Debian packages that a purpose needs and this machine lacks: packages.sh lab|check|test|image. Root access is
# not needed if none is missing.
set -eu

packages=(
    iptables nftables iproute2 conntrack procps # the proxy and the lab
    python3 python3-venv python3-dev gcc libc6-dev # python-iptables is built from source
    curl                                        # the examples in the documentation
)
case $1 in
lab) ;;
check) packages+=(git shellcheck) ;;
test) packages+=(git shellcheck groff-base) ;;
image)
    packages+=(podman debootstrap)
    # Docker brings a runc of its own. Debian's package would remove Docker.
    command -v runc >/dev/null || packages+=(runc)
    ;;
*) echo "no purpose: $1" >&2 && exit 2 ;;
esac
missing=()
for package in "${packages[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

root=()
[ "$(id -u)" = 0 ] || root=(sudo)
# shellcheck disable=SC2016 # the inner shell expands these
install='export DEBIAN_FRONTEND=noninteractive; apt-get update && apt-get install --yes --no-install-recommends "$@"'
exec "$(dirname "$0")/step.sh" "Installing Debian packages: ${missing[*]}" "${root[@]}" sh -euc "$install" sh "${missing[@]}"
