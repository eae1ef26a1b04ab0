#!/bin/bash
# docs/getting-started.md, typed as it stands by someone who has only the packages: every block in the
# page's order, "on each machine" on three of them. Run by test_packages.sh in a network of its own, so
# that ports and addresses are the page's own.
set -eu
page=/usr/share/doc/kvasir/docs/getting-started.md
model=/usr/share/kvasir/models/tinymoe-en-Q4_K_M.gguf
work=$(mktemp -d)
export HOME=$work/backbone
mkdir "$HOME" "$work/blocks"
cd "$HOME"
children= server=
stop_all() { for child in $children; do kill "$child" 2>/dev/null || true; done; wait 2>/dev/null || true; children= server=; }
trap stop_all EXIT
fail() { printf 'newcomer: %s\n' "$*"; exit 1; }
# A home network's address, on the one device that every kernel has.
ip link set lo up
ip address add 192.168.77.20/24 dev lo
ip route add default dev lo src 192.168.77.20

# launch NAME SCRIPT: starts it; its process is $!.
launch() {
    # So that ending the block ends the program.
    bash -eu -c "$(printf '%s\n' "$2" | sed -E 's/^(kvasir|kvasir-hub|llama-server) /exec \1 /')" >"$work/$1.out" 2>"$work/$1.log" </dev/null &
    children="$children $!"
}
# await NAME PID COMMAND…: until the command succeeds, for as long as the program lives.
await() {
    local name=$1 pid=$2; shift 2
    for _ in $(seq 1200); do
        "$@" && return 0
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.1
    done
    cat "$work/$name.log"
    fail "block $name did not start"
}
is_up() { curl -sf http://127.0.0.1:8080/health >/dev/null; }
has_line() { [ -s "$1" ]; }
serves() { grep -qs 'serving [0-9]* experts' "$1"; }

serve() {
    case "$2" in
        *'kvasir run'*)
            # "Stop it with Ctrl-C first."
            [ -z "$server" ] || { kill "$server"; wait "$server" || true; }
            launch "$1" "$2"; server=$!; await "$1" "$server" is_up ;;
        *)
            launch "$1" "$2"; await "$1" $! has_line "$work/$1.out"
            case "$2" in
                *kvasir-hub*) hub=$(head -1 "$work/$1.out") ;;
                *) link=$(head -1 "$work/$1.out") ;;
            esac ;;
    esac
}
# On three machines, to each of which the two files were copied. They have less memory than the page's,
# so that one does not take all there is.
join() {
    local i home
    for i in 1 2 3; do
        home=$work/machine$i
        mkdir "$home"
        cp "$HOME/kvasir/hub-ca.pem" worker.token "$home/"
        launch "$1-$i" "cd $home; export HOME=$home
$(printf '%s\n' "$2" | sed 's/--memory 2G/--memory 9M --threads 1/')"
        await "$1-$i" $! serves "$work/$1-$i.log"
    done
}

# One file a block, in the page's order: 01.run, 02.serve, …
awk -v dir="$work/blocks" '/^```sh (run|serve|join)$/ { file = sprintf("%s/%02d.%s", dir, ++n, $2); next }
    /^```$/ { file = ""; next } file { print > file }' "$page"
link=none hub=none
for block in "$work"/blocks/*; do
    script=$(sed "s|LINK|$link|; s|\bHUB\b|$hub|" "$block")
    name=$(basename "$block")
    case "$block" in
        *.serve) serve "$name" "$script" ;;
        *.join) join "$name" "$script" ;;
        *.run) bash -euo pipefail -c "$script" >"$work/$name.out" 2>&1 || { cat "$work/$name.out"; fail "block $name failed: $script"; } ;;
    esac
    case "$script" in
        *'kvasir run'*--hub*)
            # "Ask as in step 4": a chat over the three that joined.
            curl -sf http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \
                -d '{"messages": [{"role": "user", "content": "In the beginning"}], "max_tokens": 24}' >"$work/chat" ||
                fail "no chat over three workers that joined: $(cat "$work/$name.log")"
            grep -q '"content"' "$work/chat" || fail "no chat: $(cat "$work/chat")" ;;
    esac
done
case "$link" in 192.168.77.20:707?*#*) ;; *) fail "the link '$link' cannot be pasted on another machine" ;; esac
[ "$hub" = https://192.168.77.20:8443 ] || fail "the hub's address '$hub' cannot be pasted on another machine"
grep -q '"pairs_remote":[1-9]' "$work"/*.run.out || fail "no expert was computed by the worker"
grep -q '"pairs_local":0$' "$work"/*.run.out || fail "the worker did not do all of it: $(grep -h pairs_ "$work"/*.run.out)"
grep -q 'workers 3' "$work"/*.run.out || fail "kvasir top does not show three workers: $(cat "$work"/*.run.out)"
stop_all

# The same over three workers that were named, each with a third of the experts.
links=
for i in 1 2 3; do
    launch "three$i" "kvasir worker --serve 0.0.0.0:710$i --memory 8M --data $work/w$i --threads 1"
    await "three$i" $! has_line "$work/three$i.out"
    links="$links,$(head -1 "$work/three$i.out")"
done
serve three "export KVASIR_STATS_FILE=$work/stats
kvasir run $model --workers '${links#,}'"
curl -sf http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "In the beginning"}], "max_tokens": 24}' >"$work/chat" || fail "no chat over three workers"
grep -q '"content"' "$work/chat" || fail "no chat: $(cat "$work/chat")"
sleep 1.5
kvasir doctor --stats "$work/stats" --seconds 0.5 >/dev/null || { kvasir doctor --stats "$work/stats" --seconds 0.5; fail "a worker is not well"; }
grep -q '"pairs_local":0,' "$work/stats" || fail "three workers did not do all of it: $(cat "$work/stats")"
rm -rf "$work"
