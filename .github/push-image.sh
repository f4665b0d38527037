#!/usr/bin/env bash
# Push the images FILES-image-ARCHITECTURE.tar, and an index of them as NAME:VERSION. Print the name and the digests as
# outputs of a step of GitHub Actions. Usage: push-image.sh NAME VERSION FILES
set -euo pipefail

name=$1 version=$2 files=$3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

images=()
for architecture in amd64 arm64; do
    skopeo copy --digestfile "$folder/digest" \
        "oci-archive:$files-image-$architecture.tar" "docker://$name:$version-$architecture" >&2
    digest=$(cat "$folder/digest")
    echo "digest-$architecture=$digest"
    images+=("$name@$digest")
done
docker buildx imagetools create --tag "$name:$version" "${images[@]}" >&2
skopeo inspect --raw "docker://$name:$version" >"$folder/index"
echo "digest=sha256:$(sha256sum <"$folder/index" | cut -d ' ' -f 1)"
echo "name=$name"
