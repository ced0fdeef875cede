#!/bin/bash
# The second half of the demo: scripts/demo-forks.sh ENGINE. A Python interpreter
# with data in its memory waits in a template; each fork goes on from there, with a
# question of its own. One script, since each session in the testbed has files of
# its own.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

engine=$1
agentrun=build/agentrun
AGENTRUN_STATE=$(mktemp -d)
export AGENTRUN_STATE
end() {
	"$agentrun" rm demo demo-1 demo-2 demo-3 >/dev/null 2>&1 || true
	rm -rf "$AGENTRUN_STATE"
}
trap end EXIT

printf '\n$ %s snapshot demo --rootfs build/python-rootfs -- sh -c "$(cat scripts/demo-warm.sh)"\n' "$agentrun"
"$agentrun" snapshot demo --engine "$engine" --rootfs build/python-rootfs --memory 512M -- sh -c "$(cat scripts/demo-warm.sh)"
printf '\n$ %s fork demo -n 3\n' "$agentrun"
"$agentrun" fork demo -n 3

printf '\ndemo: an interpreter with the primes below 100000 in memory, %s\n' "$engine"
questions=('sum(primes)' 'max(b - a for a, b in zip(primes, primes[1:]))' 'sum(p % 4 == 1 for p in primes)')
answers=()
branch='├──'
for i in 0 1 2; do
	[ $i -lt 2 ] || branch='└──'
	name=demo-$((i + 1))
	answers+=("$("$agentrun" exec "$name" -- sh -c "echo '${questions[i]}' > /run/ask; cat /run/answer")")
	printf '%s %s: %s = %s\n' "$branch" "$name" "${questions[i]}" "${answers[i]}"
done
[ "${answers[*]}" = "454396537 72 4783" ] || die "the forks answered ${answers[*]}"
