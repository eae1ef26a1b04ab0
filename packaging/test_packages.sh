#!/bin/bash
# Installs the packages in a clean Debian tree, uses them as their users would, and purges them. Runs as
# root inside the tree; /release/packages holds the .deb files.
set -eu
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 OMP_WAIT_POLICY=passive
work=$(mktemp -d)
export HOME=$work  # what programs keep for a user is the user's, and no purge removes it
step() { printf '  %s\n' "$*"; }
fail() { printf 'test_packages: %s\n' "$*"; exit 1; }
apt() { apt-get -qq -o Dpkg::Use-Pty=0 "$@" >"$work/apt.log" 2>&1 || { tail -20 "$work/apt.log"; fail "apt-get $* failed"; }; }
children=
stop_all() { for child in $children; do kill "$child" 2>/dev/null || true; done; wait 2>/dev/null || true; children=; }
trap stop_all EXIT
# first_line FILE: waits for a program to print its first line.
first_line() {
    for _ in $(seq 600); do [ -s "$1" ] && { head -1 "$1"; return; }; sleep 0.1; done
    fail "nothing was printed in a minute: $(cat "$1.log")"
}

step "kvasir alone brings what it needs"
apt install -y /release/packages/kvasir_*_amd64.deb
version=$(dpkg-query -W -f '${Version}' kvasir)
[ "$(kvasir --version)" = "${version%-*}" ] || fail "kvasir --version says $(kvasir --version), the package $version"
linkcpp-expert-worker --help >/dev/null
! kvasir demo 2>"$work/no-plugin" || fail "kvasir demo ran without the plugin"
[ "$(stat -c %a /etc/kvasir/join.env)" = 600 ] || fail "join.env can be read by others"
apt install -y /release/packages/kvasir-plugin_*_amd64.deb /release/packages/kvasir-hub_*_amd64.deb llama.cpp-tools

step "links of the documents lead somewhere"
bash /release/check_links.sh /usr/share/doc/kvasir || fail "a document links to what is not there"
grep -q 'getting-started' /usr/share/doc/kvasir/README.md || fail "the README is another one"

step "each program and library finds its shared libraries"
for file in /usr/bin/kvasir /usr/bin/kvasir-hub /usr/lib/kvasir/libggml-kvasir.so; do
    ldd "$file" >"$work/ldd" || fail "$file is no program"
    ! grep 'not found' "$work/ldd" || fail "$file lacks libraries"
done

step "kvasir demo: three workers, the tokens of llama.cpp alone"
kvasir demo --prompts 1 --tokens 16 >"$work/demo" 2>&1 || { cat "$work/demo"; fail "kvasir demo"; }

step "slice, worker, verify"
model=/usr/share/kvasir/models/tinymoe-en-Q4_K_M.gguf
kvasir slice "$model" --layers 0:2 --experts 0:8 -o "$work/a.gguf" >/dev/null
kvasir slice "$model" --verify "$work/a.gguf" >/dev/null
kvasir worker --serve 127.0.0.1:0 --tls --data "$work/w" --slice "$work/a.gguf" --threads 1 >"$work/link" 2>"$work/link.log" &
children="$children $!"
link=$(first_line "$work/link")
case "$link" in 127.0.0.1:*#*) ;; *) fail "the worker's link is '$link'" ;; esac
kvasir verify "$model" --workers "$link" --no-tokens >"$work/verify" 2>&1 || { cat "$work/verify"; fail "kvasir verify"; }

step "hub and join"
mkdir "$work/models"
ln -s "$model" "$work/models/tiny.gguf"
token=$(kvasir-hub token create --data "$work/hub" --scope worker)
kvasir-hub --data "$work/hub" --models "$work/models" --listen 127.0.0.1:0 >"$work/url" 2>"$work/url.log" &
children="$children $!"
url=$(first_line "$work/url")
KVASIR_TOKEN=$token kvasir join "$url" --memory 8M --threads 1 --once --data "$work/node" --cache "$work/slices" >"$work/files" 2>"$work/join.log" ||
    { cat "$work/join.log"; fail "kvasir join"; }
[ -s "$work/files" ] || fail "kvasir join fetched nothing"
stop_all

step "getting started, as the page says, and a chat over three workers"
apt install -y iproute2 curl
SECONDS=0
unshare --net bash /release/newcomer.sh || fail "a newcomer would have been stuck"
step "which took $SECONDS s, besides the typing"

step "manual pages and completions"
apt install -y man-db bash-completion fish zsh
pages=$(dpkg -L kvasir kvasir-hub kvasir-plugin | sed -n 's|.*/man[17]/\(.*\)\.[17]$|\1|p')
for command in $(kvasir --help | awk '/^SUBCOMMANDS/ { on = 1; next } on && /^  [a-z]/ { print $1 }'); do
    grep -qx "kvasir-$command" <<<"$pages" || fail "kvasir $command has no manual page"
done
for page in $pages; do
    man -w "$page" >/dev/null || fail "there is no man $page"
    man --warnings "$page" 2>"$work/man.log" | grep -q DESCRIPTION || fail "man $page has no description"
    [ ! -s "$work/man.log" ] || fail "man $page: $(head -3 "$work/man.log")"
done
fish -c 'complete -C "kvasir jo"' | grep -q '^join' || fail "fish does not complete kvasir jo"
fish -c 'complete -C "kvasir-hub token create --sc"' | grep -q '^--scope' || fail "fish does not complete --sc"
# The dump file is renamed into place: it must be an ordinary one.
ZDOTDIR=$work zsh -fc 'autoload -Uz compinit && compinit -u -d "$ZDOTDIR/dump" && [[ $_comps[kvasir] = _kvasir && $_comps[kvasir-hub] = _kvasir-hub ]]' ||
    fail "zsh does not know the completions"
for file in /usr/share/zsh/vendor-completions/_kvasir*; do zsh -n "$file" || fail "$file is not zsh"; done
bash -c '. /usr/share/bash-completion/completions/kvasir; COMP_WORDS=(kvasir jo) COMP_CWORD=1; _kvasir; [ "${COMPREPLY[*]}" = join ]' ||
    fail "bash does not complete kvasir jo"

step "services"
apt install -y systemd
for unit in kvasir-join kvasir-worker kvasir-hub; do
    systemd-analyze verify "/usr/lib/systemd/system/$unit.service" 2>&1 | grep "$unit" && fail "$unit.service is not right"
    # 0 is the safest, 10 the least safe; below 2 is what systemd calls OK for a network service.
    systemd-analyze security --offline=yes --threshold=20 "/usr/lib/systemd/system/$unit.service" >"$work/security" ||
        { cat "$work/security"; fail "$unit.service is exposed more than 2.0"; }
    step "$(tail -1 "$work/security")"
done

step "purge"
# As after a life of service: state and caches are there.
for folder in kvasir-hub kvasir-join kvasir-worker; do mkdir -p "/var/lib/private/$folder"; touch "/var/lib/private/$folder/x"; ln -sfn "private/$folder" "/var/lib/$folder"; done
mkdir -p /var/cache/private/kvasir-join
rm -rf "$work/models"
apt purge -y kvasir kvasir-hub kvasir-plugin
left=$(find / -xdev \( -path /proc -o -path /sys -o -path /release -o -path /tmp -o -path /var/lib/apt -o -path /var/cache/man \) -prune -o -name '*kvasir*' -print)
[ -z "$left" ] || fail "purging left $left"
dpkg-query -W 'kvasir*' 2>/dev/null | grep . && fail "dpkg still knows a package"
rm -rf "$work"
step "all good"
