package vmmctl

import (
	"errors"
	"fmt"

	"agentrun.dev/internal/wire"
)

// Kind tells messages apart.
type Kind byte

// Kinds of messages. The first group goes to the vmm, the second comes back.
const (
	KindBoot    Kind = 1
	KindConnect Kind = 2
	KindPause   Kind = 3
	KindResume  Kind = 4
	KindConsole Kind = 5
	KindBalloon Kind = 6
	KindStop    Kind = 7
	// KindGeneration gives the guest a new generation id.
	KindGeneration Kind = 8

	KindReply Kind = 64
	KindReady Kind = 65
	KindExit  Kind = 66
)

// Limits of what a message may carry.
const (
	maxText    = 4096
	maxConsole = 64 << 10
	maxDevices = 24
	// MaxMessage bounds one message; a console tail is the largest part.
	MaxMessage = maxConsole + 2*maxText
	// MaxFiles bounds the descriptors of one message: KVM, kernel, initrd
	// and one per device.
	MaxFiles = 3 + maxDevices
)

// Message is anything that crosses the control socket.
type Message interface {
	kind() Kind
	encode(*wire.Encoder)
	decode(*wire.Decoder)
}

// Boot describes the machine. Its descriptors come in this order: KVM,
// kernel, initrd (if HasInitrd), one per disk, one per net.
type Boot struct {
	Cmdline   string
	Memory    uint64
	VCPUs     uint64
	Profile   string
	HasInitrd bool
	// ReadyPort is the host port that the guest's agent dials once, when it
	// listens. It is the only one that a guest's dialing has an effect on.
	ReadyPort uint32
	Disks     []BootDisk
	Nets      []BootNet
}

// BootDisk is a disk of Boot.
type BootDisk struct {
	ReadOnly bool
	ID       string
}

// BootNet is a network interface of Boot.
type BootNet struct {
	MAC [6]byte
	MTU uint16
}

// Connect opens a stream to a port of the guest; its one descriptor is the
// host's end.
type Connect struct {
	ID   uint64
	Port uint32
}

// Simple is a request without arguments: Pause, Resume, Console, Stop or Generation.
type Simple struct {
	Kind Kind
	ID   uint64
}

// Balloon asks the guest to give back memory.
type Balloon struct {
	ID    uint64
	Bytes uint64
}

// Reply answers the request with the same id; Boot has id 0.
type Reply struct {
	ID uint64
	// Error is empty on success.
	Error string
	// Data is the console's tail for a console request.
	Data []byte
}

// Ready says that the guest's agent listens.
type Ready struct{}

// Exit is the vmm's last word.
type Exit struct {
	Reason  string
	Detail  string
	Console []byte
}

const messageVersion = 1

// Marshal encodes a message with its kind.
func Marshal(m Message) []byte {
	e := wire.NewEncoder([]byte{byte(m.kind())})
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
	case KindConnect:
		m = &Connect{}
	case KindPause, KindResume, KindConsole, KindStop, KindGeneration:
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
	d := wire.NewDecoder(b[1:])
	d.Version(messageVersion)
	m.decode(d)
	if err := d.Finish(); err != nil {
		return nil, fmt.Errorf("decode control message of kind %d: %w", b[0], err)
	}
	return m, nil
}

func (*Boot) kind() Kind     { return KindBoot }
func (*Connect) kind() Kind  { return KindConnect }
func (m *Simple) kind() Kind { return m.Kind }
func (*Balloon) kind() Kind  { return KindBalloon }
func (*Reply) kind() Kind    { return KindReply }
func (*Ready) kind() Kind    { return KindReady }
func (*Exit) kind() Kind     { return KindExit }

func (m *Boot) encode(e *wire.Encoder) {
	e.String(m.Cmdline)
	e.Uvarint(m.Memory)
	e.Uvarint(m.VCPUs)
	e.String(m.Profile)
	e.Bool(m.HasInitrd)
	e.Uvarint(uint64(m.ReadyPort))
	e.Uvarint(uint64(len(m.Disks)))
	for _, d := range m.Disks {
		e.Bool(d.ReadOnly)
		e.String(d.ID)
	}
	e.Uvarint(uint64(len(m.Nets)))
	for _, n := range m.Nets {
		e.Data(n.MAC[:])
		e.Uvarint(uint64(n.MTU))
	}
}

func (m *Boot) decode(d *wire.Decoder) {
	m.Cmdline = d.String(maxText)
	m.Memory = d.Uvarint()
	m.VCPUs = d.UvarintMax(1 << 16)
	m.Profile = d.String(maxText)
	m.HasInitrd = d.Bool()
	m.ReadyPort = uint32(d.UvarintMax(1<<32 - 1))
	for range d.Count(maxDevices) {
		m.Disks = append(m.Disks, BootDisk{ReadOnly: d.Bool(), ID: d.String(maxText)})
	}
	for range d.Count(maxDevices) {
		var n BootNet
		if copy(n.MAC[:], d.View(len(n.MAC))) != len(n.MAC) {
			d.Fail(errors.New("a MAC address has six bytes"))
		}
		n.MTU = uint16(d.UvarintMax(1<<16 - 1))
		m.Nets = append(m.Nets, n)
	}
}

func (m *Connect) encode(e *wire.Encoder) { e.Uvarint(m.ID); e.Uvarint(uint64(m.Port)) }
func (m *Connect) decode(d *wire.Decoder) {
	m.ID, m.Port = d.Uvarint(), uint32(d.UvarintMax(1<<32-1))
}

func (m *Simple) encode(e *wire.Encoder) { e.Uvarint(m.ID) }
func (m *Simple) decode(d *wire.Decoder) { m.ID = d.Uvarint() }

func (m *Balloon) encode(e *wire.Encoder) { e.Uvarint(m.ID); e.Uvarint(m.Bytes) }
func (m *Balloon) decode(d *wire.Decoder) { m.ID, m.Bytes = d.Uvarint(), d.Uvarint() }

func (m *Reply) encode(e *wire.Encoder) { e.Uvarint(m.ID); e.String(m.Error); e.Data(m.Data) }
func (m *Reply) decode(d *wire.Decoder) {
	m.ID, m.Error, m.Data = d.Uvarint(), d.String(maxText), d.Data(maxConsole)
}

func (*Ready) encode(*wire.Encoder) {}
func (*Ready) decode(*wire.Decoder) {}

func (m *Exit) encode(e *wire.Encoder) { e.String(m.Reason); e.String(m.Detail); e.Data(m.Console) }
func (m *Exit) decode(d *wire.Decoder) {
	m.Reason, m.Detail, m.Console = d.String(maxText), d.String(maxText), d.Data(maxConsole)
}

// Clip shortens a text to what a message may carry.
func Clip(s string) string { return s[:min(len(s), maxText)] }
