#!/bin/sh
# image.sh LAYER.tar OUT.tar VERSION: an OCI archive with one layer, by buildah, without a daemon and
# without pulling a base image.
set -eu
layer=$1 out=$2 version=$3
# Of its own, and thrown away: neither the user's images nor a kernel's overlayfs are needed.
store=$(mktemp -d)
trap 'rm -rf "$store"' EXIT
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
buildah="buildah --root $store/root --runroot $store/run"
container=$($buildah from scratch)
$buildah add "$container" "$layer" / >/dev/null
$buildah config --entrypoint '["/usr/bin/kvasir"]' --cmd --help --port 7070 --port 8080 \
    --env LC_ALL=C.UTF-8 --label org.opencontainers.image.title=kvasir \
    --label org.opencontainers.image.version="$version" --label org.opencontainers.image.licenses=MIT "$container"
$buildah commit --quiet --format oci "$container" "oci-archive:$out:kvasir:$version" >/dev/null
# Read back what was written: the archive must name its own program.
$buildah pull --quiet "oci-archive:$out" >/dev/null
test "$($buildah inspect --type image --format '{{index .OCIv1.Config.Entrypoint 0}}' "kvasir:$version")" = /usr/bin/kvasir
