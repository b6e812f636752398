#!/bin/sh
# mmdebstrap's setup hook; $1 is the new root. Chooses where packages come from.
#
# mmdebstrap has written its default mirror: a line for the main suite, one for updates, one for
# security (with the right signed-by, where the building machine needs it).
set -eu

sources="$1/etc/apt/sources.list"
main=$(sed -n "1s/^deb .* *\(http[^ ]*\) $RDMALAB_SUITE .*/\1/p" "$sources")
if [ -z "$main" ]; then
    echo "E: rdmalab: no line for $RDMALAB_SUITE on top of apt's sources" >&2
    cat "$sources" >&2
    exit 1
fi

# Another mirror, if one is set: the building machine's own or a classroom's. Its place for security
# updates has to be told too; without one these updates are left out.
if [ -n "$RDMALAB_MIRROR" ]; then
    sed -i -e "s| $main | $RDMALAB_MIRROR |" "$sources"
    if [ -n "$RDMALAB_SECURITY_MIRROR" ]; then
        sed -i -e "/$RDMALAB_SUITE-security/s| http[^ ]* | $RDMALAB_SECURITY_MIRROR |" "$sources"
    else
        sed -i -e "/$RDMALAB_SUITE-security/d" "$sources"
    fi
fi

# The kernel with network namespaces for rxe comes from backports, which only the main mirror has.
sed -n "1s| $RDMALAB_SUITE | $RDMALAB_KERNEL_SUITE |p" "$sources" \
    > "$1/etc/apt/sources.list.d/kernel.list"
cat "$sources" "$1/etc/apt/sources.list.d/kernel.list"

# fakechroot does not translate where programs of systemd look for their common library (RUNPATH).
# mmdebstrap makes a library path of the folders named here, if they exist already.
if [ "$MMDEBSTRAP_MODE" = fakechroot ]; then
    mkdir -p "$1/etc/ld.so.conf.d"
    for machine in x86_64 aarch64; do
        mkdir -p "$1/usr/lib/$machine-linux-gnu/systemd"
        echo "/usr/lib/$machine-linux-gnu/systemd"
    done > "$1/etc/ld.so.conf.d/rdmalab-fakechroot.conf"
fi
