#!/bin/bash
# Runs every fuzz test of the tree, one after the other, for FUZZTIME each:
#   FUZZTIME=30s scripts/fuzz.sh [PACKAGE FOLDER…]
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

time=${FUZZTIME:-5m}
targets=$(find "${@:-.}" -name '*_test.go' -not -path './build/*' -print0 |
	xargs -0 grep -HoE '^func Fuzz[A-Za-z0-9_]+' | sed -E 's|/[^/]+:func | |' | sort -u)
[ -n "$targets" ] || die "no fuzz test found"

count=$(wc -l <<<"$targets")
echo "fuzz: $count targets, $time each"
failed=()
n=0
while read -r folder target; do
	n=$((n + 1))
	begin=$(date +%s%N)
	[[ $folder = /* || $folder = ./* ]] || folder=./$folder
	if said=$(go test -run='^$' -fuzz="^$target\$" -fuzztime="$time" -fuzzminimizetime=5s "$folder" 2>&1 </dev/null); then
		last=$(grep -E '^fuzz: elapsed' <<<"$said" | tail -n1 || true)
		printf 'ok    %d/%d %s %s (%s)\n' $n "$count" "$folder" "$target" "${last#fuzz: }"
	else
		failed+=("$folder $target")
		printf 'FAIL  %d/%d %s %s after %s\n%s\n' $n "$count" "$folder" "$target" "$(seconds_since "$begin")" "$said"
	fi
done <<<"$targets"
echo "fuzz: $((count - ${#failed[@]})) found nothing, ${#failed[@]} failed, in $(seconds_since "$script_begin")"
[ ${#failed[@]} -eq 0 ]
