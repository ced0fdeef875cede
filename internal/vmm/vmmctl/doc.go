// Package vmmctl is the language between a parent and the vmm process it
// started: one VM per process, one control socket per VM.
//
// The socket is a SOCK_SEQPACKET pair, so each message is whole and carries
// its file descriptors with it; the vmm process opens nothing by path. The
// parent sends Boot first, or Spare and Load, then requests with an id of its
// choosing; the vmm answers each with a Reply of the same id, tells Ready when
// the guest's agent has reported for duty, and Exit as its last word. When the socket
// closes without an Exit the process was killed; when the parent's end closes
// the VM is stopped, unless the parent gave it a socket to listen on: then
// others connect there and are parents like the first.
//
// The protocol has a version, which the vmm tells in its first reply (Hello), and the
// parent writes down for those who adopt it. A vmm speaks all versions up to its own: later
// ones only add messages and, at the end of messages, fields. Nobody sends a vmm what came
// after its version, so that an older one goes on under a newer parent, and the other way
// round.
//
// Every message is one byte of kind followed by a message of package codec.
package vmmctl
