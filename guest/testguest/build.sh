#!/bin/bash
# Builds the bare test guest: guest/testguest/build.sh OUT
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: build.sh OUT" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command -v gcc >/dev/null || { echo "testguest: gcc is missing: run scripts/packages.sh" >&2; exit 1; }
mkdir -p "$(dirname "$1")"
# Beside the result and renamed: test packages build it at the same time.
tmp=$1.$$
trap 'rm -f "$tmp"' EXIT
gcc -std=gnu11 -O2 -Wall -Wextra -Werror -m64 -ffreestanding -fno-pic -fno-pie -no-pie \
	-fno-stack-protector -fcf-protection=none -fno-asynchronous-unwind-tables \
	-mno-red-zone -mgeneral-regs-only -nostdlib -static \
	-Wl,-T,"$here/link.ld" -Wl,--build-id=none -Wl,-z,noexecstack -Wl,--no-warn-rwx-segments -s \
	-o "$tmp" "$here/testguest.c"
mv "$tmp" "$1"
