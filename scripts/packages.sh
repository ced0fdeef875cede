#!/bin/bash
# Installs the Debian packages which building and testing AgentRun needs.
#
#   scripts/packages.sh            install what is missing (as root), or print
#                                  the command that does
#   scripts/packages.sh --check    only say what is missing; exit 1 if anything
set -euo pipefail

packages=(build-essential busybox-static flex bison bc libelf-dev libssl-dev xz-utils erofs-utils e2fsprogs acpica-tools cpio python3 mmdebstrap systemd)
# The kernels that code runs in, and what they are tested with.
packages+=(bash nodejs python3-numpy python3-matplotlib)
# The Python SDK's tests: their tools, and a certificate.
packages+=(python3-venv openssl)
# What sandboxes are connected with in tests: programs that fetch.
packages+=(git curl ca-certificates python3-pip-whl python3-requests)

# Any version of the kernel source will do; linux-source is the newest's name.
if ! compgen -G '/usr/src/linux-source-*.tar.xz' >/dev/null; then
	packages+=(linux-source)
fi

# The emulated machine is only for hosts without hardware-backed KVM (the same
# question as `testbed check`, answered without Go).
hardware=no
if [ -w /dev/kvm ] && [ ! -e /sys/module/kvm_pvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo; then
	if [ -e /sys/module/kvm_intel ] || [ -e /sys/module/kvm_amd ]; then
		hardware=yes
	fi
fi
if [ $hardware = no ]; then
	# To build QEMU (testbed/qemu), and the firmware it runs.
	packages+=(ninja-build pkg-config libglib2.0-dev libfdt-dev libattr1-dev dpkg-dev patch qemu-system-data seabios kmod)
	# Debian's cloud kernels have no 9p; testbed says so if only they are there.
	compgen -G '/boot/vmlinuz-*-amd64' >/dev/null || packages+=(linux-image-amd64)
fi

case "${1:-}" in
'' | --check) ;;
*)
	echo "usage: scripts/packages.sh [--check]" >&2
	exit 2
	;;
esac

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
	cat >&2 <<-END
		packages: this is not Debian or Ubuntu, so nothing is installed. Needed, by Debian's names:
		  ${packages[*]}
		(gcc and make, flex, bison, bc, libelf and openssl headers, xz, mkfs.erofs, mkfs.ext4, iasl, cpio, mmdebstrap, systemd-analyze,
		a Linux source tarball named /usr/src/linux-source-VERSION.tar.xz or given as AGENTRUN_KERNEL_SOURCE,
		and, without hardware KVM, what testbed/qemu/build.sh needs, which fetches Debian's source with
		apt-get, QEMU's firmware, and a kernel in /boot with 9p and kvm-amd modules)
	END
	exit 1
fi

# One query for all: each call of dpkg-query costs 20 ms.
installed=$(dpkg-query -W -f='${db:Status-Abbrev} ${Package}\n' "${packages[@]}" 2>/dev/null | awk '$1 == "ii" { print $2 }' || true)
missing=()
for p in "${packages[@]}"; do
	grep -qxF "$p" <<<"$installed" || missing+=("$p")
done

if [ ${#missing[@]} -eq 0 ]; then
	exit 0
fi
if [ "${1:-}" = --check ] || [ "$(id -u)" -ne 0 ]; then
	echo "packages: missing. Run:" >&2
	echo "sudo apt-get install --no-install-recommends ${missing[*]}"
	exit 1
fi
echo "packages: installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >&2
apt-get install -q -y --no-install-recommends "${missing[@]}" >&2
