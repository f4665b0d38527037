#!/usr/bin/env bash
# Build the plugin from the wheel in dist/ as one executable file per system, with the pinned versions of its requirements
# for each Python. Write each file with the license as an archive for krew, and krew's manifest with the hashes.
set -eu
cd "$(dirname "$0")/../.."

: "${SOURCE_DATE_EPOCH:?}"
wheel=$(echo dist/*.whl)
version=${wheel#dist/pykubeproxy-}
version=${version%%-*}
name=kubectl-pykubeproxy
project=https://github.com/${GITHUB_REPOSITORY:-OWNER/pykubeproxy}
manifest=dist/pykubeproxy.yaml
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp LICENSE "$folder"
{
    cat requirements/node.txt
    echo "pykubeproxy==$version --hash=sha256:$(sha256sum <"$wheel" | cut -d ' ' -f 1)"
} >"$folder/constraints.txt"
sed -e "s|VERSION|$version|" -e "s|PROJECT|$project|" tests/setup/krew.yaml >"$manifest"

# Usage: build OS ARCHITECTURE PLATFORM, the platform as pip calls it
build() {
    targets=()
    for python in 311 312 313 314; do
        targets+=(--platform "$3-cp-$python-cp$python")
    done
    .venv/bin/pex "pykubeproxy==$version" --find-links dist --constraints "$folder/constraints.txt" --use-pip-config \
        --console-script $name --venv --sh-boot --output-file "$folder/zip" "${targets[@]}"
    # The zip archive begins with a script too. Readers find it from its end.
    cat tests/setup/plugin-start.sh "$folder/zip" >"$folder/$name"
    chmod 755 "$folder/$name"
    archive=$name-$version-$1-$2.tar.gz
    tar --create --directory "$folder" --owner=0 --group=0 --numeric-owner --mode=go=u-w \
        --mtime="@$SOURCE_DATE_EPOCH" $name LICENSE | gzip --no-name --fast >"dist/$archive"
    mv "$folder/$name" "dist/$name-$version-$1-$2"
    cat >>"$manifest" <<EOF
    - selector:
        matchLabels: {os: $1, arch: $2}
      uri: $project/releases/download/v$version/$archive
      sha256: $(sha256sum <"dist/$archive" | cut -d ' ' -f 1)
      bin: $name
EOF
}

build linux amd64 manylinux2014_x86_64
build linux arm64 manylinux2014_aarch64
build darwin amd64 macosx_11_0_x86_64
build darwin arm64 macosx_11_0_arm64
