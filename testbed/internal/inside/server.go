package inside

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"agentrun.dev/testbed/internal/protocol"
)

// idleLimit ends a VM that is not used, so that a forgotten one does not occupy
// gigabytes of memory.
const idleLimit = 20 * time.Minute

// idler powers the VM off after it had no session for a while.
type idler struct {
	mu     sync.Mutex // protects all following fields
	active int
	timer  *time.Timer
}

func newIdler() *idler { return &idler{timer: time.AfterFunc(idleLimit, powerOff)} }

func (i *idler) enter() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.active++
	i.timer.Stop()
}

func (i *idler) leave() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.active--; i.active == 0 {
		i.timer.Reset(idleLimit)
	}
}

// serve serves all ports and returns only on an error.
func serve() error {
	names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
	if err != nil {
		return err
	}
	idle := newIdler()
	failed := make(chan error, len(names))
	served := 0
	for _, file := range names {
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		name := strings.TrimSpace(string(b))
		if !strings.HasPrefix(name, PortPrefix) {
			continue
		}
		p, err := openPort("/dev/" + filepath.Base(filepath.Dir(file)))
		if err != nil {
			return err
		}
		s := &server{port: p, name: strings.TrimPrefix(name, PortPrefix), idle: idle}
		p.gone = func() { s.endSession() }
		served++
		go func() { failed <- s.run() }()
	}
	if served == 0 {
		return errors.New("no virtio-serial port named " + PortPrefix + "*")
	}
	return <-failed
}

// server serves one port, one session after another.
type server struct {
	port    *port
	name    string // "0", "1", …: also the suffix of the port's 9p device
	idle    *idler
	session *session // only touched by the goroutine of run
}

func (s *server) run() error {
	buf := make([]byte, protocol.MaxPayload)
	for {
		nonce, version, err := protocol.ReadHello(s.port.r)
		if err != nil {
			return fmt.Errorf("port %s: %w", s.name, err)
		}
		s.endSession()
		// The client may have been killed meanwhile. An answer that it does not take
		// must not block the next client, whose hello comes after this one.
		if err := s.port.sendRaw(protocol.Ack(nonce)); err != nil || version != protocol.Version {
			continue
		}
		if err := s.frames(buf); !errors.Is(err, protocol.ErrResync) {
			s.endSession()
			return fmt.Errorf("port %s: %w", s.name, err)
		}
	}
}

// frames handles a client's frames until its successor greets.
func (s *server) frames(buf []byte) error {
	var start []byte
	for {
		t, payload, err := protocol.ReadFrame(s.port.r, buf)
		if err != nil {
			return err
		}
		switch t {
		case protocol.StartPart:
			if len(start)+len(payload) > protocol.MaxStart {
				// An error means that the client is gone.
				_ = s.port.send(protocol.Failed, []byte("the arguments and the environment are too long"))
				return protocol.ErrResync
			}
			start = append(start, payload...)
		case protocol.Begin:
			s.endSession()
			s.begin(start)
			start = nil
		case protocol.PowerOff:
			powerOff()
		default:
			if s.session != nil {
				s.session.handle(t, payload)
			}
		}
	}
}

func (s *server) begin(start []byte) {
	var request protocol.Start
	err := json.Unmarshal(start, &request)
	if err == nil {
		s.session, err = newSession(s, request)
	}
	if err != nil {
		_ = s.port.send(protocol.Failed, []byte(err.Error())) // an error means that the client is gone
	}
}

// endSession kills the command of the last client, if it still runs.
func (s *server) endSession() {
	if s.session == nil {
		return
	}
	s.session.end()
	s.session = nil
}
