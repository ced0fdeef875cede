#!/bin/bash
# Writes docs/transcript.md: what a first session looks like, as it was. It runs the
# commands with a daemon of its own, as root: make transcript. Needs make build.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

export PATH=$build:$PATH
AGENTRUN_STATE=$(mktemp -d /tmp/agentrun-transcript-XXXXXX)
export AGENTRUN_STATE XDG_CONFIG_HOME=$AGENTRUN_STATE/config
work=$(mktemp -d)
cd "$work"
cleanup() {
	for c in $(agentrun get claims --json 2>/dev/null | sed -n 's/^ *"name": "\(.*\)",*$/\1/p'); do agentrun rm "$c" >/dev/null 2>&1 || true; done
	agentrun delete pool python-agent-pool >/dev/null 2>&1 || true
	agentrun down >/dev/null 2>&1 || true
	rm -rf "$AGENTRUN_STATE" "$work"
}
trap cleanup EXIT

cat >pool.yaml <<'END'
apiVersion: agentrun.dev/v1alpha1
kind: SandboxTemplate
metadata:
  name: python-agent
spec:
  image: python:3.12-slim
  resources:
    cpu: "1"
    memory: 512Mi
  warmup:
    code: import numpy
---
apiVersion: agentrun.dev/v1alpha1
kind: SandboxPool
metadata:
  name: python-agent-pool
spec:
  templateRef:
    name: python-agent
  replicas: 2
  snapshotAfter: Ready
END
cat >claim.yaml <<'END'
apiVersion: agentrun.dev/v1alpha1
kind: SandboxClaim
metadata:
  name: session-1
spec:
  poolRef:
    name: python-agent-pool
END

out=$repo/docs/transcript.md.new
: >"$out"
say() { printf '%s\n' "$*" >>"$out"; }
# run COMMAND: shows it and what it says.
run() {
	say "\$ $*"
	bash -c "$*" >>"$out" 2>&1 || say "(exit code $?)"
}

say "# A first session"
say
say "Made by \`make transcript\`; nothing here was typed by hand."
say
say '```console'
run 'cat pool.yaml'
agentrun image build --debian bookworm --include python3,python3-numpy -t python:3.12-slim >/dev/null 2>&1
say '$ agentrun image build --debian bookworm --include python3,python3-numpy -t python:3.12-slim'
say '$ agentrun up &'
agentrun up >"$work/log" 2>&1 &
until [ -S "$AGENTRUN_STATE/forkd/socket" ]; do sleep 0.1; done
run 'agentrun apply -f pool.yaml'
run 'agentrun logs -f template/python-agent'
until agentrun get pools | grep -q ' 2  *2 '; do sleep 0.2; done
run 'agentrun get pools'
run 'agentrun apply -f claim.yaml'
run 'agentrun code session-1 "x = numpy.arange(6); x.sum()"'
run 'agentrun fork session-1 -n 3 --name try'
run 'agentrun code try-1 "x = x + 1; x.sum()"'
run 'agentrun code try-2 "x = x * 2; x.sum()"'
run 'agentrun code session-1 "x.sum()"'
run 'agentrun exec try-3 -- sh -c "echo a file of its own > note; ls"'
run 'agentrun checkpoint try-1 --name before-lunch'
run 'agentrun rm try-1'
run 'agentrun checkpoint restore before-lunch --name after-lunch'
run 'agentrun code after-lunch "x.sum()"'
run 'agentrun hibernate try-2'
run 'agentrun get claims'
run 'agentrun tree'
run 'agentrun top --once'
say '```'
# Nothing of this machine.
sed -i "s|$AGENTRUN_STATE|/var/lib/agentrun|g; s|$work|.|g" "$out"
mv "$out" "$repo/docs/transcript.md"
