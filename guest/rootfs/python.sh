#!/bin/bash
# Makes a root filesystem with Python from this machine's own python3, its
# standard library and the shared libraries that it needs, on top of busybox:
# guest/rootfs/python.sh OUT
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: python.sh OUT" >&2; exit 2; }

# Debian's, if it is there: another one may be a script that picks a version.
python=$(PATH=/usr/bin:$PATH command -v python3) || { echo "rootfs: python3 is missing: sudo apt-get install python3" >&2; exit 1; }
python=$(readlink -f "$("$python" -c 'import sys; print(sys.executable)')")
version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
stdlib=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')

"$(dirname "${BASH_SOURCE[0]}")/busybox.sh" "$1"
# busybox.sh makes /usr/bin a link to /bin.
cp "$python" "$1/bin/$version"
ln -sf "$version" "$1/bin/python3"
mkdir -p "$1$stdlib"
tar -C "$stdlib" --exclude=test --exclude=tests --exclude=idlelib --exclude=tkinter --exclude=lib2to3 \
	--exclude=ensurepip --exclude='config-*' --exclude=dist-packages --exclude=site-packages -cf - . | tar -C "$1$stdlib" -xf -

# The interpreter's libraries, and those of its extension modules.
find "$1$stdlib" -name '*.so' -print0 | xargs -0 "$(dirname "${BASH_SOURCE[0]}")/libraries.sh" "$1" "$python"
