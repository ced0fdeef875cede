package vmmctl

import (
	"errors"
	"fmt"

	"agentrun.dev/internal/codec"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/livefork"
)

// Protocol is the version of the protocol that this package implements.
const Protocol = SincePlug

// Versions that have added messages. Version 1 has all others, and sends no Hello.
const (
	SinceStream = 2 // Save with Stream
	SincePlug   = 3 // Plug
)

// Kind tells messages apart.
type Kind byte

// Kinds of messages. The first group goes to the vmm, the second comes back.
const (
	KindBoot    Kind = 1
	KindConnect Kind = 2
	KindPause   Kind = 3
	// KindResume lets the machine continue. The reply's data is one byte: 1 if
	// it stood still before.
	KindResume  Kind = 4
	KindConsole Kind = 5
	KindBalloon Kind = 6
	KindStop    Kind = 7
	// KindGenerationID gives the guest a new generation id.
	KindGenerationID Kind = 8
	KindSpare        Kind = 9
	KindSave         Kind = 10
	// KindTouched asks which pages of memory the machine has touched. The
	// process's page map comes with it.
	KindTouched Kind = 11
	// KindSettle waits until the guest has given back unused memory.
	KindSettle Kind = 12
	KindLoad   Kind = 13
	// KindPark is Pause until the parent sends something on a stream.
	KindPark Kind = 14
	// KindStream is Save of a machine that stands still, to pipes.
	KindStream Kind = 15
	KindPlug   Kind = 16

	KindReply Kind = 64
	KindReady Kind = 65
	KindExit  Kind = 66
)

// Limits of the contents of a message.
const (
	maxText    = 4096
	maxConsole = 64 << 10
	maxDevices = 24
	// MaxTouched bounds the number of runs in each list of touched pages.
	MaxTouched = 2048
	// MaxMessage bounds one message; the stacks of a machine with many
	// layered disks are the largest.
	MaxMessage = 128 << 10
	// MaxFiles bounds the descriptors of one message; the kernel accepts 253.
	MaxFiles = 240
)

// Message is a message on the control socket.
type Message interface {
	kind() Kind
	encode(*codec.Encoder)
	decode(*codec.Decoder)
}

// Boot describes a machine to boot. Its descriptors come in this order: KVM,
// /dev/userfaultfd (if HasUserfaultfd), kernel, initrd (if HasInitrd), those of
// the devices.
type Boot struct {
	Cmdline        string
	Memory         uint64
	VCPUs          uint64
	Profile        string
	HasUserfaultfd bool
	HasInitrd      bool
	Devices        Devices
}

// Spare describes a machine with memory and processors but without a state. It
// is made before it is known which snapshot it will continue. Load follows, at
// once or much later. The descriptors come in this order: KVM, /dev/userfaultfd
// (if HasUserfaultfd), the layers of the memory.
type Spare struct {
	Memory         layer.Stack
	Profile        string
	VCPUs          uint64
	HasUserfaultfd bool
	// Touch lists the pages that the guest will need at once.
	Touch Touched
	// Watch says that a Touched request will follow.
	Watch bool
}

// Load continues a saved machine in a spare. Its descriptors are the saved
// state and those of the devices.
type Load struct {
	ID      uint64
	Devices Devices
}

// Devices lists the devices of a machine. Its descriptors are those of each
// disk, one per net, the listening socket (if Listen) and that of the standby
// connection (if Standby).
type Devices struct {
	// Listen says that one more descriptor follows: a socket on which the vmm
	// accepts further parents. With it the VM outlives its first parent.
	Listen bool
	// ReadyPort is the host port that the guest's agent dials once, when it
	// listens. Dialing any other port has no effect.
	ReadyPort uint32
	// Standby says that one more descriptor follows: the host's end of the
	// connection that a restored guest continues.
	Standby bool
	Disks   []Disk
	Nets    []Net
	// MaxFile is the maximum size of all files that the vmm is given, including
	// its disks and the files of a Save. The vmm sets this limit for itself, for
	// good, before the guest's first instruction.
	MaxFile uint64
}

// Disk is a disk in one file, or a disk with a stack. The descriptors of a disk
// with a stack are the stack's layers and its own writable top.
type Disk struct {
	ReadOnly bool
	ID       string
	Stack    *layer.Stack
	// BytesPerSecond and OpsPerSecond limit its rates; 0 is unlimited.
	BytesPerSecond, OpsPerSecond uint64
}

// Files is how many descriptors a disk comes with.
func (d *Disk) Files() int {
	if d.Stack == nil {
		return 1
	}
	return len(d.Stack.Layers) + 1
}

// Files is how many descriptors the devices come with.
func (d *Devices) Files() int {
	n := len(d.Nets)
	if d.Listen {
		n++
	}
	if d.Standby {
		n++
	}
	for i := range d.Disks {
		n += d.Disks[i].Files()
	}
	return n
}

// Net is a network interface.
type Net struct {
	MAC [6]byte
	MTU uint16
}

// Save writes a machine, as of one instant, to files: its state, the changes of
// its memory relative to its stack, and the same for each disk that has a stack.
// A machine that was running continues as soon as possible. The descriptors are
// the page map of the vmm process, which it cannot open itself, the state, the
// memory (each page at its offset in RAM), and for each disk with a stack the
// layer and an empty file that becomes its top. The reply's data is a Saved.
type Save struct {
	ID uint64
	// Stream says that memory and layers are pipes. The machine stands still until
	// the reply comes. The vmm writes the runs of the memory to its pipe, one after
	// the other, then those of each disk to the disk's pipe. It closes each pipe
	// before it writes to the next. Stream excludes Rebase.
	Stream bool
	// Rebase makes the saved content part of the machine's stack. If this Save
	// succeeds, the next Save lists only the changes after it.
	Rebase bool
	// Memory and Disks list runs to be stored even if they did not change.
	Memory []extent.Run
	Disks  [][]extent.Run
}

// Saved lists the contents of the layers that Save wrote, and how much it cost.
type Saved struct {
	Memory         Change
	Disks          []Change
	livefork.Stats // without Captured
}

// Change describes a layer: the runs that it holds, one after the other, and
// the runs that have become zeros.
type Change struct{ Runs, Zeros []extent.Run }

// Connect opens a stream to a port of the guest; its one descriptor is the
// host's end. Copies of the guest continue the standby.
type Connect struct {
	ID      uint64
	Port    uint32
	Standby bool
}

// Plug gives a network interface another wire; its one descriptor is the guest's
// end. A vmm process older than SincePlug closes the connection when it receives
// Plug.
type Plug struct {
	ID  uint64
	Net uint64 // index in Devices.Nets
}

// Simple is a request without arguments: Pause, Park, Resume, Console, Stop,
// GenerationID, Touched or Settle.
type Simple struct {
	Kind Kind
	ID   uint64
}

// Balloon asks the guest to give back memory.
type Balloon struct {
	ID    uint64
	Bytes uint64
}

// Reply answers the request with the same id; Boot and Spare have id 0.
type Reply struct {
	ID uint64
	// Error is empty on success.
	Error string
	// Data is the console's tail for a console request, a Saved for Save, pages for
	// Touched, and a Hello for Boot and Spare.
	Data []byte
}

// Hello tells the protocol version of the vmm process. A vmm of an AgentRun without
// versions sends none of it.
type Hello struct{ Protocol uint64 }

// Marshal encodes h for a Reply's data.
func (h Hello) Marshal() []byte {
	e := codec.NewEncoder(nil)
	e.Version(messageVersion)
	e.Uvarint(h.Protocol)
	return e.Bytes()
}

// maxProtocol is higher than any version will ever be.
const maxProtocol = 1 << 16

// UnmarshalHello decodes a Reply's data; empty data means version 1.
func UnmarshalHello(b []byte) (Hello, error) {
	if len(b) == 0 {
		return Hello{1}, nil
	}
	d := codec.NewDecoder(b)
	d.Version(messageVersion)
	h := Hello{d.UvarintMax(maxProtocol)}
	err := d.Finish()
	if err == nil && h.Protocol == 0 {
		err = errors.New("there is no version 0")
	}
	if err != nil {
		return Hello{}, fmt.Errorf("decode what a vmm speaks: %w", err)
	}
	return h, nil
}

// Ready says that the guest's agent listens.
type Ready struct{}

// Exit is the last message of the vmm.
type Exit struct {
	Reason  string
	Detail  string
	Console []byte
}

const messageVersion = 1

// Marshal encodes a message with its kind.
func Marshal(m Message) []byte {
	e := codec.NewEncoder([]byte{byte(m.kind())})
	e.Version(messageVersion)
	m.encode(e)
	return e.Bytes()
}

// Unmarshal decodes one message.
func Unmarshal(b []byte) (Message, error) {
	if len(b) == 0 {
		return nil, errors.New("decode control message: it is empty")
	}
	var m Message
	switch k := Kind(b[0]); k {
	case KindBoot:
		m = &Boot{}
	case KindSpare:
		m = &Spare{}
	case KindLoad:
		m = &Load{}
	case KindSave, KindStream:
		m = &Save{Stream: k == KindStream}
	case KindConnect:
		m = &Connect{}
	case KindPlug:
		m = &Plug{}
	case KindPause, KindPark, KindResume, KindConsole, KindStop, KindGenerationID, KindTouched, KindSettle:
		m = &Simple{Kind: k}
	case KindBalloon:
		m = &Balloon{}
	case KindReply:
		m = &Reply{}
	case KindReady:
		m = &Ready{}
	case KindExit:
		m = &Exit{}
	default:
		return nil, fmt.Errorf("decode control message: unknown kind %d", k)
	}
	d := codec.NewDecoder(b[1:])
	d.Version(messageVersion)
	m.decode(d)
	if err := d.Finish(); err != nil {
		return nil, fmt.Errorf("decode control message of kind %d: %w", b[0], err)
	}
	return m, nil
}

func (*Boot) kind() Kind  { return KindBoot }
func (*Spare) kind() Kind { return KindSpare }
func (*Load) kind() Kind  { return KindLoad }
func (m *Save) kind() Kind {
	if m.Stream {
		return KindStream
	}
	return KindSave
}
func (*Connect) kind() Kind  { return KindConnect }
func (*Plug) kind() Kind     { return KindPlug }
func (m *Simple) kind() Kind { return m.Kind }
func (*Balloon) kind() Kind  { return KindBalloon }
func (*Reply) kind() Kind    { return KindReply }
func (*Ready) kind() Kind    { return KindReady }
func (*Exit) kind() Kind     { return KindExit }

func (m *Connect) encode(e *codec.Encoder) {
	e.Uvarint(m.ID)
	e.Uvarint(uint64(m.Port))
	e.Bool(m.Standby)
}

func (m *Connect) decode(d *codec.Decoder) {
	m.ID, m.Port, m.Standby = d.Uvarint(), uint32(d.UvarintMax(1<<32-1)), d.Bool()
}

func (m *Plug) encode(e *codec.Encoder) { e.Uvarint(m.ID); e.Uvarint(m.Net) }
func (m *Plug) decode(d *codec.Decoder) { m.ID, m.Net = d.Uvarint(), d.UvarintMax(maxDevices) }

func (m *Simple) encode(e *codec.Encoder) { e.Uvarint(m.ID) }
func (m *Simple) decode(d *codec.Decoder) { m.ID = d.Uvarint() }

func (m *Balloon) encode(e *codec.Encoder) { e.Uvarint(m.ID); e.Uvarint(m.Bytes) }
func (m *Balloon) decode(d *codec.Decoder) { m.ID, m.Bytes = d.Uvarint(), d.Uvarint() }

func (m *Reply) encode(e *codec.Encoder) { e.Uvarint(m.ID); e.String(m.Error); e.Data(m.Data) }
func (m *Reply) decode(d *codec.Decoder) {
	m.ID, m.Error, m.Data = d.Uvarint(), d.String(maxText), d.Data(maxConsole)
}

func (*Ready) encode(*codec.Encoder) {}
func (*Ready) decode(*codec.Decoder) {}

func (m *Exit) encode(e *codec.Encoder) { e.String(m.Reason); e.String(m.Detail); e.Data(m.Console) }
func (m *Exit) decode(d *codec.Decoder) {
	m.Reason, m.Detail, m.Console = d.String(maxText), d.String(maxText), d.Data(maxConsole)
}

// Clip shortens a text to the limit of a message.
func Clip(s string) string { return s[:min(len(s), maxText)] }
