#!/usr/bin/env bash
# Run a command with another iptables than the system's: iptables.sh VERSION COMMAND…
# Builds it from source in build/ at first; both backends, in one file each with all extensions. Only the command sees it.
# Needs root, gcc, make, bison, flex, libmnl-dev and libnftnl-dev.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
version=$1
shift

case $version in
1.8.7) suffix=bz2 hash=c109c96bb04998cd44156622d36f8e04b140701ec60531a10668cfdff5e8d8f0 ;;
1.8.11) suffix=xz hash=d87303d55ef8c92bcad4dd3f978b26d272013642b029425775f5bad1009fe7b2 ;;
*) echo "no hash of iptables $version is known" >&2 && exit 1 ;;
esac
built=$root/build/iptables-$version
if [ ! -x "$built/iptables/xtables-nft-multi" ]; then
    archive=$built.tar.$suffix
    mkdir -p "$root/build"
    [ -e "$archive" ] || curl -fsSLo "$archive" "https://www.netfilter.org/pub/iptables/${archive##*/}"
    echo "$hash  $archive" | sha256sum --check --quiet
    tar --extract --directory "$root/build" --file "$archive"
    (cd "$built" && ./configure --prefix=/usr --disable-shared --enable-static --disable-connlabel >/dev/null &&
        make --jobs=2 >/dev/null 2>&1)
fi
export built
# shellcheck disable=SC2016 # the inner shell expands these
exec unshare --mount --propagation private bash -c '
    for backend in nft legacy; do
        mount --bind "$built/iptables/xtables-$backend-multi" "$(readlink -f "$(command -v "iptables-$backend")")"
    done
    exec "$@"' bash "$@"
