# shellcheck shell=bash
# fetch URL FILE SHA256: download a file and keep it only if its hash matches.
fetch() {
    local url=$1 file=$2 expected=$3 actual
    curl --fail --silent --show-error --location --retry 3 --output "$file.new" "$url"
    actual=$(sha256sum "$file.new" | cut -d' ' -f1)
    if [ "$actual" != "$expected" ]; then
        rm -f "$file.new"
        echo "SHA-256 mismatch for $url: expected $expected, got $actual; update vagrant/versions.env if the file changed on purpose" >&2
        return 1
    fi
    mv "$file.new" "$file"
}
