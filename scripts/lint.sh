#!/bin/bash
# Runs golangci-lint, which is built on first use and kept in the cache:
#   scripts/lint.sh [--if-possible] [ARGUMENTS OF golangci-lint run…]
# With --if-possible a linter that cannot be fetched is no failure: the same
# findings come up wherever it can be.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

version=${GOLANGCI_VERSION:-v2.14.0}
optional=no
if [ "${1:-}" = --if-possible ]; then
	optional=yes
	shift
fi

tools=$cache/tools/golangci-lint-$version
linter=$tools/golangci-lint
if [ ! -x "$linter" ]; then
	echo "lint: building golangci-lint $version (a few minutes, once)" >&2
	mkdir -p "$tools"
	new=$(mktemp -d "$tools/new.XXXXXX")
	trap 'rm -rf "$new"' EXIT
	if ! GOFLAGS='' GOBIN=$new CGO_ENABLED=0 go install -ldflags='-s -w' \
		"github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$version" >"$tools/install.log" 2>&1; then
		tail -n 3 "$tools/install.log" >&2
		[ $optional = no ] || { echo "lint: NOT RUN: golangci-lint $version cannot be built here" >&2; exit 0; }
		die "golangci-lint $version cannot be built (log: $tools/install.log)"
	fi
	mv "$new/golangci-lint" "$linter"
fi
# Without cgo, as programs are built: what was compiled for them serves here, too.
export CGO_ENABLED=0
# Another checkout may be looked at meanwhile.
"$linter" run --allow-parallel-runners "$@"
# gVisor's helper is a module of its own.
cd gvisor
exec "$linter" run --allow-parallel-runners "$@"
