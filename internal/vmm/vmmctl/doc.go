// Package vmmctl is the protocol between a parent and the vmm process that it
// started: one VM per process, one control socket per VM.
//
// The socket is a SOCK_SEQPACKET pair, so each message is whole and carries its file
// descriptors with it; the vmm process opens no paths. The parent sends Boot first,
// or Spare and Load, and then requests with ids of its choice. The vmm answers each
// with a Reply of the same id. It sends Ready when the guest's agent has dialed the
// ready port, and Exit as its last message. If the socket closes without an Exit, the
// process was killed. If the parent's end closes, the VM is stopped, unless the
// parent gave it a socket to listen on: then other parents can connect there, with
// the same rights as the first.
//
// The protocol has a version. The vmm sends it in its first reply (Hello), and the parent
// stores it for the next parent that adopts the vmm. A vmm speaks all versions up to its
// own, because later versions only add messages and, at the end of messages, fields. A
// parent sends a vmm only messages and fields of the vmm's version. So an older vmm
// continues under a newer parent, and the other way round.
//
// Every message is one byte of kind followed by a message of package codec.
package vmmctl
