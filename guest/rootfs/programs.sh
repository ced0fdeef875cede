#!/bin/bash
# Makes a root filesystem with programs that fetch things from a network: pip, git,
# curl, apt-get and Python's requests, from this machine's own, on top of Python:
# guest/rootfs/programs.sh OUT
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: programs.sh OUT" >&2; exit 2; }
here=$(dirname "${BASH_SOURCE[0]}")
for program in git curl apt-get; do
	[ -x "/usr/bin/$program" ] || { echo "rootfs: $program is missing: sudo apt-get install ${program%-get}" >&2; exit 1; }
done
pip=$(compgen -G '/usr/share/python-wheels/pip-*.whl' | tail -n 1) ||
	{ echo "rootfs: pip is missing: sudo apt-get install python3-pip-whl" >&2; exit 1; }
debian=/usr/lib/python3/dist-packages
[ -d $debian/requests ] || { echo "rootfs: Python's requests is missing: sudo apt-get install python3-requests" >&2; exit 1; }

"$here/python.sh" "$1"
# Debian's mark that apt-get, not pip, installs modules: here there is only pip.
rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED
modules=$1/usr/local/lib/$(readlink "$1/bin/python3")/dist-packages
mkdir -p "$modules"
python3 -m zipfile -e "$pip" "$modules"
# requests, and what it imports, where Debian has them: what pip installs comes first.
mkdir -p "$1$debian"
cp -r $debian/{requests,urllib3,idna,certifi,chardet,six.py} "$1$debian/"
printf '#!/bin/sh\nexec python3 -m pip "$@"\n' >"$1/bin/pip"
chmod 755 "$1/bin/pip"

mkdir -p "$1/usr/lib/git-core" "$1/usr/lib/apt/methods" "$1/etc/apt/apt.conf.d" "$1/etc/apt/preferences.d" "$1/etc/apt/sources.list.d" "$1/etc/apt/trusted.gpg.d" \
	"$1/var/lib/apt/lists/partial" "$1/var/cache/apt/archives/partial" "$1/var/lib/dpkg" "$1/usr/share/dpkg"
cp /usr/bin/{git,curl,apt-get} "$1/bin/"
cp /usr/lib/git-core/git-remote-http "$1/usr/lib/git-core/"
ln -s git-remote-http "$1/usr/lib/git-core/git-remote-https"
cp /usr/lib/apt/methods/{http,store} "$1/usr/lib/apt/methods/"
ln -s http "$1/usr/lib/apt/methods/https"
: >"$1/var/lib/dpkg/status"
cp /usr/share/dpkg/{cputable,tupletable} "$1/usr/share/dpkg/"
# There is no dpkg to ask.
echo 'APT::Architectures { "amd64"; };' >"$1/etc/apt/apt.conf.d/architecture"
echo '_apt:x:42:65534::/nonexistent:/bin/false' >>"$1/etc/passwd"
"$here/libraries.sh" "$1" /usr/bin/{git,curl,apt-get} /usr/lib/git-core/git-remote-http /usr/lib/apt/methods/{http,store}
