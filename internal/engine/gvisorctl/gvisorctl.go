// Package gvisorctl is the protocol between the gVisor engine and the helper process
// of a sandbox. A message is JSON in one packet of a control socket (package vmmctl),
// with descriptors. The helper runs beside the sandbox, not in it, and trusts its
// parent. The parent does not trust the helper, because a sandbox that has taken over
// gVisor's kernel speaks to the helper.
//
// The protocol has a version. A helper reports its version when it makes or describes
// a sandbox, and speaks all versions up to that: later versions only add requests.
// The parent never sends a helper requests that are newer than its version. So an
// older helper goes on under a newer engine, and a newer helper under an older
// engine.
//
// A helper's first request is Create, which makes a sandbox that waits. Next comes
// Start or Restore; a Load may precede Restore. Any number of other requests may be
// under way at once, and each gets one answer. The last message is an Exit.
package gvisorctl

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"agentrun.dev/internal/vmm/vmmctl"
)

// Protocol is the version of the protocol that this package describes.
const Protocol = SinceWire

// Versions that have added requests. Version 1 has all other requests, and its
// helpers do not report a version.
const (
	SinceStream = 2 // added OpStream
	SinceWire   = 3 // added OpWire
)

// Op is the operation of a request.
type Op string

// The operations, with the files that accompany each.
const (
	// OpCreate makes a sandbox. Its files are the root filesystem's image and the
	// agent.
	OpCreate Op = "create"
	// OpStart boots the sandbox. With Network, its files are the two ends of the
	// wire: the sandbox's, and the host's, which the helper keeps.
	OpStart Op = "start"
	// OpLoad lets the sandbox read a checkpoint ahead of OpRestore. Its files are the
	// checkpoint's files in the order of CheckpointFiles, then, with Network, the
	// ends of the wire.
	OpLoad Op = "load"
	// OpRestore lets the sandbox go on from a checkpoint. Its files are the
	// checkpoint's files in the order of CheckpointFiles, then, with Network, the
	// ends of the wire. After OpLoad it has none of these files. With Listen, the
	// last file is a listening socket.
	OpRestore Op = "restore"
	// OpWire asks for the host's end of the wire, which accompanies the reply. It is
	// the only descriptor that a helper ever sends.
	OpWire Op = "wire"
	// OpDial connects its file, a stream, to Port.
	OpDial Op = "dial"
	// OpPause and OpResume stop the sandbox and let it go on.
	OpPause  Op = "pause"
	OpResume Op = "resume"
	// OpCheckpoint writes the sandbox to its files, in the order of CheckpointFiles.
	// The sandbox then goes on.
	OpCheckpoint Op = "checkpoint"
	// OpStream writes the sandbox to three pipes, in the order of CheckpointFiles.
	// The sandbox then goes on. The two ends of a stream socket pair follow the
	// pipes; the helper and gVisor's kernel speak over these meanwhile.
	OpStream Op = "stream"
	// OpDescribe asks for a description of the sandbox.
	OpDescribe Op = "describe"
	// OpConsole asks for the tail of the agent's output.
	OpConsole Op = "console"
	// OpStop ends the sandbox.
	OpStop Op = "stop"
)

// CheckpointFiles are the files of a checkpoint.
var CheckpointFiles = []string{"checkpoint.img", "pages_meta.img", "pages.img"}

// Message is a request, a reply or the exit of the sandbox.
type Message struct {
	ID uint64 `json:"id"`
	Op Op     `json:"op,omitempty"`

	// Create is also set in the reply to OpDescribe.
	Create *Create `json:"create,omitempty"`
	Port   uint32  `json:"port,omitempty"`
	Listen bool    `json:"listen,omitempty"`
	// Network is the interface of OpStart, OpLoad and OpRestore. With nil the sandbox
	// has only a loopback.
	Network *Network `json:"network,omitempty"`
	// Wire is the descriptor in a reply to OpWire. The receiver sets it.
	Wire *os.File `json:"-"`

	// Reply and the following fields are set in replies.
	Reply bool   `json:"reply,omitempty"`
	Error string `json:"error,omitempty"`
	// Data is the console.
	Data []byte `json:"data,omitempty"`
	// Took is how long a checkpoint kept the sandbox from running.
	Took time.Duration `json:"took,omitempty"`
	// Protocol is the version that the helper speaks, in replies to OpCreate and
	// OpDescribe. It is 0 for the helper of an AgentRun before versions were counted.
	Protocol int `json:"protocol,omitempty"`
	// SentryPID is the process id of gVisor's kernel.
	SentryPID int `json:"sentry_pid,omitempty"`

	Exit *Exit `json:"exit,omitempty"`
}

// Create describes a sandbox.
type Create struct {
	// ID names the sandbox. All ids have the same length, because gVisor finds
	// sandboxes by prefix.
	ID string `json:"id"`
	// RunDir is an empty folder of the sandbox's own.
	RunDir   string `json:"run_dir"`
	Platform string `json:"platform"`
	Hostname string `json:"hostname"`
	// Memory is the amount of memory that programs see. Disk is how far the root
	// filesystem may grow.
	Memory uint64 `json:"memory"`
	Disk   uint64 `json:"disk"`
	VCPUs  int    `json:"vcpus"`
	// DNS are the servers that the agent writes to resolv.conf when it boots. They
	// are part of a checkpoint, as is the agent's command line.
	DNS []netip.Addr `json:"dns,omitempty"`
}

// Network is an interface, eth0. Its frames go to a wire, in the format of package
// wire.
type Network struct {
	MAC     [6]byte      `json:"mac"`
	MTU     int          `json:"mtu"`
	Address netip.Prefix `json:"address"`
	// Gateway is not valid without a gateway.
	Gateway netip.Addr `json:"gateway"`
	// Address6 and Gateway6 are the same for IPv6. Without IPv6, neither is valid.
	Address6 netip.Prefix `json:"address6"`
	Gateway6 netip.Addr   `json:"gateway6"`
}

// Exit is how a sandbox ended.
type Exit struct {
	Reason  string `json:"reason"`
	Detail  string `json:"detail,omitempty"`
	Console []byte `json:"console,omitempty"`
}

// Reasons of an Exit.
const (
	ReasonPowerOff = "power-off" // by the agent
	ReasonStopped  = "stopped"   // by the host
	ReasonKilled   = "killed"    // gVisor's kernel ended without an exit message
)

// Conn is one end of a control socket.
type Conn struct{ *vmmctl.Conn }

// NewConn takes over a SOCK_SEQPACKET socket.
func NewConn(f *os.File) (Conn, error) {
	c, err := vmmctl.NewConn(f)
	return Conn{c}, err
}

// Dial connects to a helper that listens at path.
func Dial(path string) (Conn, error) {
	c, err := vmmctl.Dial(path)
	return Conn{c}, err
}

// Send sends a message with copies of the files.
func (c Conn) Send(m *Message, files ...*os.File) error {
	b, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode control message: %w", err)
	}
	return c.SendBytes(b, files...)
}

// Receive waits for a message. The caller owns the files. The error is io.EOF
// when the other end is closed.
func (c Conn) Receive() (*Message, []*os.File, error) {
	b, files, err := c.ReceiveBytes()
	if err != nil {
		return nil, nil, err
	}
	m := &Message{}
	if err := json.Unmarshal(b, m); err != nil {
		err = fmt.Errorf("decode control message: %w", err)
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
		return nil, nil, err
	}
	return m, files, nil
}
