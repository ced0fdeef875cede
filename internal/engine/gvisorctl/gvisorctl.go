// Package gvisorctl is the protocol between the gVisor engine and the helper
// process of a sandbox. A message is JSON in one packet of a control socket
// (package vmmctl), with descriptors. The helper runs beside the sandbox, not in
// it, and trusts its parent. The parent does not trust it: a sandbox that has
// taken over gVisor's kernel speaks to the helper.
//
// The protocol has a version, which a helper says when it makes a sandbox and when it
// describes one. It speaks all up to that: later ones only add. Nobody asks a helper for
// what came after its version, so that an older one goes on under a newer engine, and the
// other way round.
//
// A helper begins with Create, which makes a sandbox that waits, and goes on
// with Start or Restore, before which Load may come. Any number of other requests may be under way at once;
// each is answered once. The last message is an Exit.
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

// Protocol is the version of the protocol that is described here.
const Protocol = SinceWire

// Versions that have added requests. Version 1 has the others, and does not say so.
const (
	SinceStream = 2 // OpStream
	SinceWire   = 3 // OpWire
)

// Op says what a request asks for.
type Op string

// The requests, with the files that come with them.
const (
	// OpCreate makes a sandbox: its root filesystem's image and the agent.
	OpCreate Op = "create"
	// OpStart boots it; with Network, the two ends of its wire come along: the
	// sandbox's, and the host's, which the helper keeps.
	OpStart Op = "start"
	// OpLoad has it read a checkpoint ahead of OpRestore: the checkpoint's files
	// in the order of CheckpointFiles; then, with Network, the ends of the wire.
	OpLoad Op = "load"
	// OpRestore lets it go on from a checkpoint: its files in the order of
	// CheckpointFiles; then, with Network, the ends of the wire; but none of these
	// after OpLoad; then, with Listen, a listening socket.
	OpRestore Op = "restore"
	// OpWire asks for the host's end of the wire, which comes with the reply. It is
	// the only descriptor that a helper ever sends.
	OpWire Op = "wire"
	// OpDial connects a stream, which comes with it, to Port.
	OpDial Op = "dial"
	// OpPause and OpResume stop the sandbox and let it go on.
	OpPause  Op = "pause"
	OpResume Op = "resume"
	// OpCheckpoint writes the sandbox to files that come with it, in the order of
	// CheckpointFiles, and goes on.
	OpCheckpoint Op = "checkpoint"
	// OpStream writes the sandbox to three pipes in the order of CheckpointFiles,
	// and goes on. After them come the two ends of a stream socket pair, which the
	// helper and gVisor's kernel speak over meanwhile.
	OpStream Op = "stream"
	// OpDescribe asks what sandbox it is.
	OpDescribe Op = "describe"
	// OpConsole asks for the tail of what the agent has printed.
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

	// Create is also in the reply to OpDescribe.
	Create *Create `json:"create,omitempty"`
	Port   uint32  `json:"port,omitempty"`
	Listen bool    `json:"listen,omitempty"`
	// Network is the interface of OpStart, OpLoad and OpRestore; nil is a loopback
	// only.
	Network *Network `json:"network,omitempty"`
	// Wire is the descriptor of a reply to OpWire, for whoever has received it to
	// put there.
	Wire *os.File `json:"-"`

	// Of replies.
	Reply bool   `json:"reply,omitempty"`
	Error string `json:"error,omitempty"`
	// Data is the console.
	Data []byte `json:"data,omitempty"`
	// Took is for how long a checkpoint kept the sandbox from running.
	Took time.Duration `json:"took,omitempty"`
	// Protocol is the version that the helper speaks, in replies to OpCreate and
	// OpDescribe; 0 says that it is of an AgentRun that did not count them.
	Protocol int `json:"protocol,omitempty"`
	// SentryPID is the process of gVisor's kernel.
	SentryPID int `json:"sentry_pid,omitempty"`

	Exit *Exit `json:"exit,omitempty"`
}

// Create describes a sandbox.
type Create struct {
	// ID names the sandbox: as long as any other, as gVisor finds them by prefix.
	ID string `json:"id"`
	// RunDir is an empty folder of its own.
	RunDir   string `json:"run_dir"`
	Platform string `json:"platform"`
	Hostname string `json:"hostname"`
	// Memory is what programs are told there is, Disk what the root may grow by.
	Memory uint64 `json:"memory"`
	Disk   uint64 `json:"disk"`
	VCPUs  int    `json:"vcpus"`
	// DNS are the servers that the agent writes to resolv.conf when it boots. They
	// are part of a checkpoint, as the agent's command line is.
	DNS []netip.Addr `json:"dns,omitempty"`
}

// Network is an interface, eth0, whose frames go to a wire, as package wire
// describes them.
type Network struct {
	MAC     [6]byte      `json:"mac"`
	MTU     int          `json:"mtu"`
	Address netip.Prefix `json:"address"`
	// Gateway is not valid where there is none.
	Gateway netip.Addr `json:"gateway"`
	// Address6 and Gateway6 are the same of IPv6; neither is valid without it.
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
	ReasonKilled   = "killed"    // gVisor's kernel ended without a last word
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
