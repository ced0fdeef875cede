// Package agent is the guest agent, PID 1 of every sandbox. It builds the root
// filesystem, runs and reaps processes, runs code in interpreters, keeps the output
// of both, moves files in and out as any user, gives a fork its identity, and shuts
// the guest down. It needs no program in the root filesystem.
//
// The agent is forked together with its VM, so every page it dirties and every
// wake-up it causes is paid once per fork. The rules that follow from that:
//
//   - No timer and no polling when idle. Everything waits on an event: SIGCHLD,
//     a readable pipe, a channel. The only timer is one time.AfterFunc per exec
//     that asked for a timeout, and one per shutdown.
//   - Few goroutines: one reaper, and one pump per output stream, parked in the
//     runtime's epoll. A watch has none of its own.
//   - Buffers grow lazily and are read into directly: an exec that prints
//     nothing has no buffer, one that prints little has 4 KiB.
//   - No encoding/json, reflection, fmt, os/user or os/exec. Programs are
//     started with syscall.ForkExec, which is a CLONE_VM|CLONE_VFORK clone: the
//     agent's memory is not copied, whatever its size.
//
// Code runs in interpreters that stay (docs/design/code.md). The agent sets them up
// on first use, so a fork that runs no code pays nothing for them.
//
// An exec belongs to the agent, not to a connection: a caller that goes away only
// loses its place, and can attach again from an offset.
//
// Everything that comes from a caller, from the kernel command line or from a file of
// the root filesystem is hostile: it is bounded and checked, and ends in an error,
// never in a panic. A panic in PID 1 is a kernel panic.
package agent
