#!/bin/bash
# Statement coverage of the tests that run on the host, per package, with the
# profile in build/cover.out (go tool cover -html build/cover.out).
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mkdir -p "$build"
# shellcheck disable=SC2046 # one argument per package
go test -count=1 -covermode=atomic -coverprofile="$build/cover.out" \
	$(go list ./... | grep -vE '^agentrun\.dev/(test/microvm|testbed$)') |
	awk '/coverage:/ { sub(/\(cached\)/, ""); print } /^(---|FAIL)/ { print }'
go tool cover -func="$build/cover.out" | tail -n1
