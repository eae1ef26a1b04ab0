#!/bin/bash
# Whether each relative link of the documents under a folder leads to a file there.
set -eu
cd "$1"
broken=0
while read -r page; do
    # Not what stands in a fenced block.
    while read -r target; do
        case "$target" in ''|'#'*|*:*) continue ;; esac
        [ -e "$(dirname "$page")/${target%%#*}" ] || { printf '%s links to %s\n' "$page" "$target"; broken=1; }
    done < <(awk '/^ *```/ { code = !code } !code' "$page" | grep -o '](\([^) ]*\))' | sed 's/^](//; s/)$//')
done < <(find . -name '*.md' | sort)
exit $broken
