# shellcheck shell=bash
# `./dev release`: every package, image and checksum of a version, into build-release/packages.
# Sourced by ./dev, whose roots and build functions it uses.

release_usage() {
    cat <<'H'
usage: ./dev release [--no-arm64] [--no-image] [--no-test]

  Builds kvasir, kvasir-hub and kvasir-plugin as Debian packages for amd64 and arm64, installs, uses and
  purges the amd64 ones in a clean Debian testing tree, makes a container image (an OCI archive) with
  all three and llama.cpp, and writes SHA256SUMS. Needs the network, for the clean tree's packages.
H
}

in_root() { (inside "$@"); }  # inside replaces the process that calls it

# release_cpack ROOT DIR: the packages of one build tree into its packages/ folder.
release_cpack() {
    rm -rf "${2:?}/packages"
    (cd "$2"; in_root "$1" env SOURCE_DATE_EPOCH="$release_epoch" cpack -G DEB >"$2/cpack.log" 2>&1) ||
        { tail -20 "$2/cpack.log" >&2; die "cpack failed; its whole output is in $2/cpack.log."; }
}

release_build_native() {
    (cd "$top"; in_root "$1" cmake --preset release -B "$2" -Wno-dev --log-level=WARNING -DBUILD_TESTING=OFF -DKVASIR_PACKAGES=ON >&2)
    (cd "$top"; in_root "$1" cmake --build "$2" -j "$jobs" --target kvasir kvasir-hub ggml-kvasir kvasir_command_docs >&2)
    release_cpack "$1" "$2"
    local deb component
    for deb in "$2"/packages/*.deb; do
        component=$(basename "$deb"); component=${component%%_*}; component=${component#kvasir-}
        in_root "$1" dpkg-deb -f "$deb" Depends >"$2/$component.depends"
    done
}

# The arm64 packages take manual pages and the names of their dependencies from the native ones, which
# holds as long as both link the same libraries; that is compared.
release_build_arm64() {
    local native=$1 dir=$2 arm_root sysroot file
    if host_is_testing packages.txt packages-arm64.txt; then arm_root=; else arm_root=$(make_root packages.txt packages-arm64.txt); fi
    sysroot=$(arm64_sysroot)
    (cd "$top"; in_root "$arm_root" cmake --preset release -B "$dir" -Wno-dev --log-level=WARNING -DBUILD_TESTING=OFF -DKVASIR_PACKAGES=ON \
        -DKVASIR_COMMAND_DOCS="$native/command-docs" -DKVASIR_SHLIBDEPS_FROM="$native" \
        -DCMAKE_TOOLCHAIN_FILE="$top/cmake/aarch64-linux-gnu.cmake" -DKVASIR_SYSROOT="$sysroot" >&2)
    (cd "$top"; in_root "$arm_root" cmake --build "$dir" -j "$jobs" --target kvasir kvasir-hub ggml-kvasir >&2)
    release_cpack "$arm_root" "$dir"
    for file in bin/kvasir bin/kvasir-hub lib/libggml-kvasir.so; do
        diff <(release_needed "$arm_root" "$native/$file") <(release_needed "$arm_root" "$dir/$file") >&2 ||
            die "$file links other libraries on arm64 than here, so its dependencies cannot be taken over."
    done
    local unpacked
    unpacked=$(mktemp -d)
    (cd "$dir/packages"; for file in *.deb; do in_root "$arm_root" dpkg-deb -x "$file" "$unpacked"; done)
    for file in kvasir kvasir-hub; do
        in_root "$arm_root" qemu-aarch64 -L "$sysroot" "$unpacked/usr/bin/$file" --version >&2 || die "the arm64 $file does not start."
    done
    rm -rf "$unpacked"
}

release_needed() {  # ROOT FILE -> shared libraries, the loader left out
    in_root "$1" readelf -d "$2" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -v '^ld-linux' | sort
}

# clean_tree OUT FORMAT SCRIPT: a new Debian testing tree in which packaging/SCRIPT has run as root.
clean_tree() {
    mmdebstrap --quiet --variant=apt --format="$2" \
        --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='APT::Install-Recommends "false"' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        --customize-hook='mkdir "$1/release"' \
        --customize-hook="copy-in $release_dir/packages $top/packaging/newcomer.sh $top/packaging/check_links.sh $top/packaging/$3 /release" \
        --customize-hook="chroot \"\$1\" bash /release/$3 >&2" \
        --customize-hook='rm -rf "$1/release"' \
        testing "$1" || die "$3 failed in the clean tree; its messages are above."
}

release_image() {
    say "making the container image"
    local layer=$release_dir/image-root.tar
    clean_tree "$layer" tar image_root.sh
    rm -f "$release_dir/packages/kvasir-$release_version-oci-amd64.tar"
    in_root "$1" sh "$top/packaging/image.sh" "$layer" "$release_dir/packages/kvasir-$release_version-oci-amd64.tar" "$release_version" >&2 ||
        die "buildah could not make the image (its message is above); $layer is the whole tree, for podman import or docker import."
    rm -f "$layer"
}

release() {
    local arm64=1 image=1 test=1 root
    while [ $# -gt 0 ]; do
        case "$1" in
            --no-arm64) arm64= ;; --no-image) image= ;; --no-test) test= ;;
            *) release_usage >&2; die "release has no option '$1'." ;;
        esac
        shift
    done
    release_dir=$top/build-release
    release_version=$(sed -n 's/^project(kvasir VERSION \([0-9.]*\).*/\1/p' "$top/CMakeLists.txt")
    release_epoch=$(git -C "$top" log -1 --format=%ct 2>/dev/null || date +%s)
    if host_is_testing packages.txt packages-release.txt; then root=; else root=$(make_root packages.txt packages-release.txt); fi
    need_tools
    say "building the packages"
    release_build_native "$root" "$release_dir"
    if [ -n "$test" ]; then
        say "installing, using and purging them in a clean tree"
        clean_tree /dev/null null test_packages.sh
    fi
    if [ -n "$arm64" ]; then
        say "building the packages for arm64"
        release_build_arm64 "$release_dir" "$top/build-release-arm64"
        cp "$top"/build-release-arm64/packages/*.deb "$release_dir/packages/"
    fi
    [ -z "$image" ] || release_image "$root"
    (cd "$release_dir/packages"; rm -rf _CPack_Packages; sha256sum -- *.deb $([ -z "$image" ] || echo ./*.tar) | sed 's|\./||' >SHA256SUMS)
    say "made in $release_dir/packages:"
    (cd "$release_dir/packages"; ls -l -- *.deb *.tar SHA256SUMS 2>/dev/null) || true
}
