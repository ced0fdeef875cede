package netctl

import (
	"errors"
	"fmt"
	"time"

	"agentrun.dev/internal/codec"
)

// Protocol is the version of the protocol. It changes when an old netd and a new
// daemon, or a new netd and an old daemon, cannot work together. A mere addition is a
// Feature instead.
//
// 2: rules carry injections, and settings carry roots. A netd that ignored them would
// send requests without their credentials.
//
// 3: a lineage carries the names asked for below wildcards.
const Protocol = 3

// Features are the features of this version beyond its protocol. There are none so
// far.
var Features []string

// Kind is the kind of a message.
type Kind byte

// Kinds of messages. The first group goes to a netd, and the second group comes back.
const (
	KindHello     Kind = 1
	KindConfigure Kind = 2
	KindAttach    Kind = 3
	KindDetach    Kind = 4
	KindSetPolicy Kind = 5
	KindPause     Kind = 6
	KindResume    Kind = 7
	KindMark      Kind = 8
	KindCollect   Kind = 9
	KindList      Kind = 10
	KindLog       Kind = 11
	KindStats     Kind = 12
	KindShutdown  Kind = 13

	KindWelcome Kind = 64
	KindReply   Kind = 65
)

// Limits of the contents of messages.
const (
	// MaxMessage bounds one message. The largest message is the lineage of a sandbox
	// with many connections and long names.
	MaxMessage = 8 << 20
	// MaxTuples and MaxPins bound a lineage. Further connections and pins are left
	// out.
	MaxTuples = 16 << 10
	MaxPins   = 8 << 10
	// MaxWildcards bounds the patterns of a lineage: 16 policies of 256 allow rules.
	MaxWildcards = 4 << 10
	// MaxWires bounds the wires of one netd.
	MaxWires = 8 << 10
	// MaxEntries bounds the entries of the log in one answer.
	MaxEntries = 1024
	// MaxWait is the longest time that a request for the log waits for the next
	// entry.
	MaxWait = 30 * time.Second

	maxText      = 4 << 10
	maxReason    = 512 // of an entry of the log, which has many
	maxName      = 256 // of a domain; DNS has 253
	maxID        = 128
	maxPolicies  = 3 << 20 // as JSON: 16 policies of 512 rules of 280 bytes
	maxUpstreams = 16
	maxDomains   = 256
	maxRanges    = 4096 // as many as addresses.ParseRanges reads
	maxCounters  = 1024
	maxFeatures  = 64
	maxDuration  = 10 * 365 * 24 * time.Hour
	maxRoots     = 1 << 20 // in PEM; Debian's bundle has 220 KiB
	maxDER       = 16 << 10
	maxFormat    = 512
	// maxInjections bounds the hosts of one sandbox, and the credentials of each.
	maxInjections = 64
)

// Message is anything that crosses the control socket.
type Message interface {
	kind() Kind
	fields(coder)
}

// Request is a message that is answered with a Reply of its id.
type Request interface {
	Message
	RequestID() uint64
}

// ID identifies a wire. It is the id of the sandbox's machine.
type ID string

// Check refuses invalid ids.
func (id ID) Check() error {
	if len(id) == 0 || len(id) > maxID {
		return fmt.Errorf("a wire's id of %d bytes: 1 to %d are possible", len(id), maxID)
	}
	for _, b := range []byte(id) {
		if b <= ' ' || b > '~' {
			return fmt.Errorf("a wire's id %q: it has bytes that are no printable ASCII", string(id))
		}
	}
	return nil
}

const messageVersion = 1

// Marshal encodes a message with its kind.
func Marshal(m Message) []byte {
	e := codec.NewEncoder([]byte{byte(m.kind())})
	e.Version(messageVersion)
	m.fields(coder{e: e})
	return e.Bytes()
}

// Unmarshal decodes one message.
func Unmarshal(b []byte) (Message, error) {
	if len(b) == 0 {
		return nil, errors.New("decode control message: it is empty")
	}
	m := newMessage(Kind(b[0]))
	if m == nil {
		return nil, fmt.Errorf("decode control message: unknown kind %d", b[0])
	}
	if err := decode(b[1:], m); err != nil {
		return nil, fmt.Errorf("decode control message of kind %d: %w", b[0], err)
	}
	return m, nil
}

func newMessage(k Kind) Message {
	switch k {
	case KindHello:
		return &Hello{}
	case KindConfigure:
		return &Configure{}
	case KindAttach:
		return &Attach{}
	case KindSetPolicy:
		return &SetPolicy{}
	case KindDetach, KindPause, KindResume, KindMark:
		return &OfWire{Kind: k}
	case KindCollect:
		return &Collect{}
	case KindList, KindStats, KindShutdown:
		return &Simple{Kind: k}
	case KindLog:
		return &Log{}
	case KindWelcome:
		return &Welcome{}
	case KindReply:
		return &Reply{}
	}
	return nil
}

func decode(b []byte, m interface{ fields(coder) }) error {
	d := codec.NewDecoder(b)
	d.Version(messageVersion)
	m.fields(coder{d: d})
	return d.Finish()
}

// Result is the data of a Reply.
type Result interface{ fields(coder) }

// MarshalResult encodes a Result.
func MarshalResult(r Result) []byte {
	e := codec.NewEncoder(nil)
	e.Version(messageVersion)
	r.fields(coder{e: e})
	return e.Bytes()
}

// UnmarshalResult decodes a Result.
func UnmarshalResult(b []byte, r Result) error {
	if err := decode(b, r); err != nil {
		return fmt.Errorf("decode the answer of a netd: %w", err)
	}
	return nil
}

// Code is the reason for which a request failed.
type Code uint64

// The codes of replies.
const (
	CodeOK Code = iota
	CodeInternal
	CodeInvalid
	CodeNotFound
	CodeExists
	CodeBusy
	codes
)

// Errors of a netd that callers branch on. All others are internal.
var (
	// ErrInvalid: the request is invalid, and would be if it were repeated.
	ErrInvalid = errors.New("invalid request")
	// ErrNotFound: there is no wire of this id.
	ErrNotFound = errors.New("no such wire")
	// ErrExists: a wire of this id is attached already.
	ErrExists = errors.New("the wire is attached already")
	// ErrBusy: a bound of the process is reached.
	ErrBusy = errors.New("too much at once")
)

var codeErrors = map[Code]error{CodeInvalid: ErrInvalid, CodeNotFound: ErrNotFound, CodeExists: ErrExists, CodeBusy: ErrBusy}

// Hello is the first message of a connection.
type Hello struct {
	Protocol uint64
	Features []string
}

// Welcome is the answer to Hello.
type Welcome struct {
	Protocol uint64
	Features []string
	// Version is the netd's version, for people.
	Version string
	PID     uint64
	Started time.Time
	// Refused says why the netd closes the connection; empty if it does not.
	Refused string
}

// Reply answers the request with the same id.
type Reply struct {
	ID   uint64
	Code Code
	// Error is empty on success.
	Error string
	// Data is the Result of requests that have one.
	Data []byte
}

// Fail is the reply of a request that failed.
func Fail(id uint64, err error) *Reply {
	r := &Reply{ID: id, Code: CodeInternal, Error: clip(err.Error())}
	for code, is := range codeErrors {
		if errors.Is(err, is) {
			r.Code = code
		}
	}
	return r
}

// Err is the error in a reply; nil on success.
func (r *Reply) Err() error {
	switch is, known := codeErrors[r.Code]; {
	case r.Code == CodeOK:
		return nil
	case known:
		return &Error{Text: r.Error, is: is}
	}
	return &Error{Text: r.Error}
}

// Error is a netd's reason for not carrying out a request.
type Error struct {
	Text string
	is   error
}

func (e *Error) Error() string { return e.Text }

// Unwrap returns the sentinel of the answer's code.
func (e *Error) Unwrap() error { return e.is }

func clip(s string) string { return s[:min(len(s), maxText)] }

func (*Hello) kind() Kind   { return KindHello }
func (*Welcome) kind() Kind { return KindWelcome }
func (*Reply) kind() Kind   { return KindReply }

func (m *Hello) fields(c coder) {
	c.number(&m.Protocol)
	c.texts(&m.Features, maxFeatures, maxName)
}

func (m *Welcome) fields(c coder) {
	c.number(&m.Protocol)
	c.texts(&m.Features, maxFeatures, maxName)
	c.text(&m.Version, maxName)
	c.number(&m.PID)
	c.time(&m.Started)
	c.text(&m.Refused, maxText)
}

func (r *Reply) fields(c coder) {
	code := uint64(r.Code)
	c.number(&r.ID)
	c.numberMax(&code, uint64(codes)-1)
	c.text(&r.Error, maxText)
	c.data(&r.Data, MaxMessage)
	r.Code = Code(code)
}
