#!/bin/sh
# mmdebstrap's customize hook; $1 is the new root, with all packages installed.
#
# Puts kernel, busybox and packages.list below $1/boot/, the modules of modules.txt below
# $1/usr/lib/modules/, and makes the root ready for a read-only file system.
# Lines "I: rdmalab: ..." are progress that the caller shows.
set -eu

root=$1
work="$root/tmp/rdmalab"        # inside the root, so that chroot sees it; mmdebstrap empties /tmp
tree="$work/tree"               # kernel and busybox packages, unpacked and not installed

step() { echo "I: rdmalab: $*"; }
die() { echo "E: rdmalab: $*" >&2; exit 1; }

# Names in a list file: comments and blank lines left out.
names() { sed -e 's/#.*//' -e 's/[[:space:]]*$//' -e '/^$/d' "$1"; }

# Unpack the kernel's packages. Installing them would bring initramfs-tools and run it, and the
# metapackage's name is the only one that stays: which packages hold the image and the modules
# has changed before, so the names come out of apt's own answer.
fetch_kernel() {
    step "fetching the kernel"
    wanted=$(apt-get install -s --no-install-recommends \
            "linux-image-$RDMALAB_ARCH/$RDMALAB_KERNEL_SUITE" |
        sed -n 's/^Inst \(linux-\(image\|binary\|modules\|base\)-[0-9][^ ]*\) (\([^ ]*\).*/\1=\3/p')
    [ -n "$wanted" ] || die "linux-image-$RDMALAB_ARCH in $RDMALAB_KERNEL_SUITE pulls in no kernel"
    mkdir -p "$tree"
    (cd "$work" && apt-get download $wanted busybox-static)
    step "unpacking the kernel"
    unpacked=
    for deb in "$work"/*.deb; do
        unpacked="$unpacked${unpacked:+
}$(dpkg-deb -W --showformat '${Package} ${Version}' "$deb")"
        dpkg-deb -x "$deb" "$tree"
        rm "$deb"
    done
    [ -e "$tree/lib" ] || ln -s usr/lib "$tree/lib"
}

place_kernel() {
    version=$(cd "$tree"/lib/modules && echo *)
    case $version in *\ *|\*) die "expected one kernel version, found: $version" ;; esac
    mkdir -p "$root/boot"
    for image in "$tree/lib/modules/$version/vmlinuz" "$tree"/boot/vmlinu[xz]-*; do
        if [ -f "$image" ]; then cp "$image" "$root/boot/kernel"; fi
    done
    [ -f "$root/boot/kernel" ] || die "the kernel's packages hold no vmlinuz"
    unpack_kernel
    cp "$(find "$tree" -path '*/bin/busybox' -type f)" "$root/boot/busybox"
    echo "$version" > "$root/boot/kernel-version"
}

# On amd64 QEMU also boots the ELF file inside vmlinuz (PVH), which saves an emulated processor a
# second of unpacking it. A kernel that is packed otherwise stays as it is, and boots all the same.
unpack_kernel() {
    magic=$(printf '\050\265\057\375')   # zstd's
    offset=$(LC_ALL=C grep -abom1 "$magic" "$root/boot/kernel" |
        LC_ALL=C cut -d : -f 1 | head -n 1)
    [ "$RDMALAB_ARCH" = amd64 ] && [ -n "$offset" ] || return 0
    # zstd complains about what follows the packed part, after it has written all of it
    tail -c "+$((offset + 1))" "$root/boot/kernel" | zstd -qdc > "$work/vmlinux" 2> /dev/null || :
    if [ "$(head -c 4 "$work/vmlinux" | tail -c 3)" = ELF ]; then
        mv "$work/vmlinux" "$root/boot/kernel"
    fi
}

# Print the files, below lib/modules/VERSION/, of the modules in modules.txt and of all that they
# need. modprobe of the root knows hard and soft dependencies and what is built in.
module_files() {
    for name in $(names "$RDMALAB_GUEST/modules.txt"); do
        if ! chroot "$root" modprobe -S "$version" -d /tmp/rdmalab/tree --show-depends \
                "${name%\?}" > "$work/depends" 2> "$work/problem"; then
            case $name in *\?) continue ;; esac
            cat "$work/problem" >&2
            die "the kernel $version has no module $name (see modules.txt)"
        fi
        sed -n "s|^insmod .*/lib/modules/$version/\([^ ]*\).*|\1|p" "$work/depends"
    done
}

# Modules go in unpacked: the guest may be emulated, where xz costs a second a module; the root's
# file system compresses them anyway.
place_modules() {
    step "choosing modules of kernel $version"
    from="$tree/lib/modules/$version"
    to="$root/usr/lib/modules/$version"
    chroot "$root" depmod -b /tmp/rdmalab/tree "$version"
    module_files > "$work/files"
    for file in $(sort -u "$work/files"); do
        mkdir -p "$to/${file%/*}"
        case $file in
            *.xz) xz -dc "$from/$file" > "$to/${file%.xz}" ;;
            *.zst) zstd -qdc "$from/$file" > "$to/${file%.zst}" ;;
            *) cp "$from/$file" "$to/$file" ;;
        esac
    done
    cp "$from"/modules.builtin "$from"/modules.builtin.modinfo "$from"/modules.order "$to/"
    chroot "$root" depmod "$version"
}

# A cold start of Python under emulation is mostly compiling. Hashes that nobody checks make the
# result independent of file times, which the root file system does not keep.
compile_python() {
    step "compiling Python files"
    set -- -q -f --invalidation-mode unchecked-hash
    compile='python3 -m compileall "$@" /usr/lib/python3 /usr/lib/python3.*'
    # in parallel where the root has what that takes (/dev/shm, sockets)
    chroot "$root" sh -c "$compile" sh "$@" -j 0 > "$work/parallel.log" 2>&1 ||
        chroot "$root" sh -c "$compile" sh "$@"
}

# dpkg makes the folders of files that it leaves out. Some 350 of them would be searched at every
# look for a Python module or its entry points.
remove_empty_folders() {
    find "$root/usr/lib/python3/dist-packages" "$root/usr/share" -depth -type d -empty -delete
}

# rdma-core's own Python tests: an oracle that this kit did not write. Debian packs documentation.
unpack_tests() {
    find "$root/usr/share/doc/rdma-core/tests" -name '*.gz' -exec gzip -d {} +
}

# All packages with their versions, also those of which only files were taken.
list_packages() {
    chroot "$root" dpkg-query -W -f '${Package} ${Version}\n' > "$root/boot/packages.list"
    echo "$unpacked" >> "$root/boot/packages.list"
}

write_accounts() {
    echo 'learner:x:1000:1000:learner:/home/learner:/bin/bash' >> "$root/etc/passwd"
    echo 'learner:x:1000:' >> "$root/etc/group"
    echo 'learner:*:20000:0:99999:7:::' >> "$root/etc/shadow"
    echo rdmalab > "$root/etc/hostname"
    printf '127.0.0.1 localhost\n::1 localhost\n' > "$root/etc/hosts"
    # mmdebstrap copied the building machine's: it is nobody's business in the guest
    : > "$root/etc/resolv.conf"
    mkdir -p "$root/opt/rdmalab"
}

export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
fetch_kernel
unset APT_CONFIG
place_kernel
place_modules
list_packages
unpack_tests
remove_empty_folders
compile_python
write_accounts
step "root ready"
