#!/bin/bash
# Measures AgentRun beside its peers, on hardware KVM or in the testbed:
#   FIRECRACKER=PATH scripts/bench-peers.sh [FLAGS OF build/bench peers…]
# microsandbox is installed into the cache, at the pinned version, from the
# index that pip is configured for. The chart is left in build/out/peers.svg.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

requirements=bench/peers/requirements.txt

# install_microsandbox makes a virtual environment, whole or not at all. Its
# folder is named by what is in it and by the Python that it is for.
install_microsandbox() {
	[ ! -x "$venv/bin/python" ] || return 0
	mkdir -p "$(dirname "$venv")"
	rm -rf "$venv.new"
	python3 -m venv "$venv.new" || die "python3 -m venv failed: sudo apt-get install python3-venv"
	"$venv.new/bin/pip" install --quiet --no-deps --only-binary=:all: --require-hashes -r "$requirements"
	mv "$venv.new" "$venv"
}

# A script in a moved environment would name the old folder; the interpreter
# finds its own.
key=$( (cat "$requirements"; python3 --version; command -v python3) | sha256sum | cut -c1-16)
venv=$cache/peers/$key

peers() {
	local python=() firecracker=()
	[ ! -x "$venv/bin/python" ] || python=(--python "$venv/bin/python")
	[ -z "${FIRECRACKER:-}" ] || firecracker=(--firecracker "$FIRECRACKER")
	mkdir -p "$build/out"
	inside build/bench peers --rootfs build/demo-rootfs --program /bin/nothing \
		--plot build/out/peers.svg "${python[@]}" "${firecracker[@]}" "$@"
}

scripts/packages.sh
phase "programs" build_programs
phase "guest kernel" build_kernel
[ "$(where)" = hardware ] || phase "QEMU and a kernel for the testbed" build_testbed
phase "a root filesystem of busybox" guest/rootfs/busybox.sh "$build/demo-rootfs"
phase "microsandbox" install_microsandbox || echo "bench-peers: going on without microsandbox" >&2
phase "AgentRun and its peers ($(where))" peers "$@"
