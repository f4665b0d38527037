# shellcheck shell=bash
# fetch URL FILE SHA256: a file from elsewhere, which is there afterwards only if it is the one that is meant.
fetch() {
    local url=$1 file=$2 wanted=$3 found
    curl --fail --silent --show-error --location --retry 3 --output "$file.new" "$url"
    found=$(sha256sum "$file.new" | cut -d' ' -f1)
    if [ "$found" != "$wanted" ]; then
        rm -f "$file.new"
        echo "$url has the SHA-256 $found, not $wanted: it is not used." >&2
        return 1
    fi
    mv "$file.new" "$file"
}
