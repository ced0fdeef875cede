#!/bin/bash
# Installs what scripts/build.sh has made: make install [PREFIX=/usr] [DESTDIR=…].
# Programs go to PREFIX/lib/agentrun, with PREFIX/bin/agentrun, manual pages,
# completions and the systemd unit, which is not enabled.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

prefix=${PREFIX:-/usr}
root=${DESTDIR:-}$prefix
programs=(agentrun vmm netd guest-agent gvisor-helper)
for p in "${programs[@]}"; do
	[ -x "$build/$p" ] || die "$p is not built: run make build"
done
[ -f "$build/vmlinux" ] || die "the guest kernel is not built: run make build"

install -d "$root/lib/agentrun" "$root/bin" "$root/share/man/man1" "$root/lib/systemd/system"
for p in "${programs[@]}"; do install -m 755 "$build/$p" "$root/lib/agentrun/$p"; done
install -m 644 "$build/vmlinux" "$root/lib/agentrun/vmlinux"
ln -sfn ../lib/agentrun/agentrun "$root/bin/agentrun"
rm -f "$root"/share/man/man1/agentrun*.1 # of commands that are gone
"$build/agentrun" man "$root/share/man/man1"
install -d "$root/share/bash-completion/completions" "$root/share/zsh/site-functions" "$root/share/fish/vendor_completions.d"
"$build/agentrun" completion bash >"$root/share/bash-completion/completions/agentrun"
"$build/agentrun" completion zsh >"$root/share/zsh/site-functions/_agentrun"
"$build/agentrun" completion fish >"$root/share/fish/vendor_completions.d/agentrun.fish"
sed "s|/usr/lib/agentrun|$prefix/lib/agentrun|" deploy/systemd/agentrun.service >"$root/lib/systemd/system/agentrun.service"
