#!/bin/bash
# docs/getting-started.md, typed as it stands by someone who has only the packages; then the same with
# three workers. Run by test_packages.sh in a network of its own, so that ports and addresses are the
# page's own.
set -eu
page=/usr/share/doc/kvasir/getting-started.md
work=$(mktemp -d)
children=
stop_all() { for child in $children; do kill "$child" 2>/dev/null || true; done; wait 2>/dev/null || true; children=; }
trap stop_all EXIT
fail() { printf 'newcomer: %s\n' "$*"; exit 1; }
# A home network's address, on the one device that every kernel has.
ip link set lo up
ip address add 192.168.77.20/24 dev lo
ip route add default dev lo src 192.168.77.20

# serve NAME SCRIPT: starts it, and waits for the line that it prints, or for its health.
serve() {
    bash -eu -c "$2" >"$work/$1.out" 2>"$work/$1.log" </dev/null &
    children="$children $!"
    for _ in $(seq 1200); do
        case "$2" in
            *'kvasir worker'*) [ ! -s "$work/$1.out" ] || return 0 ;;
            *) curl -sf http://127.0.0.1:8080/health >/dev/null && return 0 ;;
        esac
        kill -0 $! 2>/dev/null || break
        sleep 0.1
    done
    cat "$work/$1.log"
    fail "block $1 did not start: $2"
}

# One file a block, in the page's order: 01.run, 02.serve, …
awk -v dir="$work" '/^```sh (run|serve)$/ { file = sprintf("%s/%02d.%s", dir, ++n, $2); next } /^```$/ { file = ""; next } file { print > file }' "$page"
link=none
for block in "$work"/[0-9]*; do
    script=$(sed "s|LINK|$link|" "$block")
    name=$(basename "$block")
    # So that ending the block ends the program.
    case "$block" in *.serve) script=$(printf '%s\n' "$script" | sed -E 's/^(kvasir|llama-server) /exec \1 /') ;; esac
    case "$block" in
        *.serve)
            serve "$name" "$script"
            case "$script" in *'kvasir worker'*) link=$(head -1 "$work/$name.out") ;; esac ;;
        *.run) bash -euo pipefail -c "$script" >"$work/$name.out" 2>&1 || { cat "$work/$name.out"; fail "block $name failed: $script"; } ;;
    esac
done
case "$link" in 192.168.77.20:707?*#*) ;; *) fail "the link '$link' cannot be pasted on another machine" ;; esac
grep -q '"pairs_remote":[1-9]' "$work"/*.run.out || fail "no expert was computed by the worker"
grep -q '"pairs_local":0$' "$work"/*.run.out || fail "the worker did not do all of it: $(grep -h pairs_ "$work"/*.run.out)"
stop_all

links=
for i in 1 2 3; do
    serve "three$i" "exec kvasir worker --serve 0.0.0.0:710$i --memory 8M --data $work/w$i --threads 1"
    links="$links,$(head -1 "$work/three$i.out")"
done
serve three "GGML_BACKEND_PATH=/usr/lib/kvasir/libggml-kvasir.so KVASIR_WORKERS='${links#,}' KVASIR_UPLOAD=1 KVASIR_LOCAL=fallback \
    KVASIR_STATS_FILE=$work/stats exec llama-server -m /usr/share/kvasir/models/tinymoe-en-Q4_K_M.gguf --no-repack --port 8080"
curl -sf http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "In the beginning"}], "max_tokens": 24}' >"$work/chat" || fail "no chat over three workers"
grep -q '"content"' "$work/chat" || fail "no chat: $(cat "$work/chat")"
sleep 1.5
kvasir doctor --stats "$work/stats" --seconds 0.5 >/dev/null || { kvasir doctor --stats "$work/stats" --seconds 0.5; fail "a worker is not well"; }
grep -q '"pairs_local":0,' "$work/stats" || fail "three workers did not do all of it: $(cat "$work/stats")"
rm -rf "$work"
