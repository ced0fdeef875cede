package enginetest

import (
	"path/filepath"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
)

// echoBlob sends a file to the lan and compares the bytes that come back.
func echoBlob(address string) string {
	return "nc " + address + " 7 < /blob | cmp - /blob && echo same"
}

// testWire: the two ends of a wire leave checksums and segments to each other, and
// neither end loses the other's messages.
func (s *suite) testWire(t *testing.T) {
	source := s.bootWired(t)
	sh(t, source, "head -c 1200000 /dev/urandom > /blob")
	snap, err := source.Snapshot(t.Context(), filepath.Join(s.dir, "wire"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	t.Run("Segments", func(t *testing.T) { s.testSegments(t, source) })
	t.Run("Slow", func(t *testing.T) { s.testSlowWire(t, s.fork(t, snap, engine.ForkOptions{})) })
	t.Run("Pause", func(t *testing.T) { s.testPausedWire(t, s.fork(t, snap, engine.ForkOptions{})) })
	t.Run("Adopt", func(t *testing.T) {
		dir := folder(t)
		sb := s.fork(t, snap, engine.ForkOptions{Folder: dir})
		s.testAdoptedWire(t, sb, dir)
	})
}

// testSegments: long segments go both ways in one piece, over IPv4 and IPv6, and
// arrive unchanged.
func (s *suite) testSegments(t *testing.T, sb engine.Sandbox) {
	for number, address := range []string{"10.0.2.2", "2001:db8::7"} {
		// The length of segments depends on how quickly programs write: the slower
		// the network is, the more bytes wait to be sent.
		for delay := time.Millisecond; ; delay *= 4 {
			l := newSlowLAN(t, sb, byte(number), delay)
			if got := sh(t, sb, echoBlob(address)); got != "same" {
				t.Errorf("%s: %q", address, got)
			}
			longest, partial := l.seen()
			l.end()
			if longest[0] >= 2*tcpSegment && longest[1] >= 2*tcpSegment && partial > 0 {
				break
			}
			if delay > 50*time.Millisecond {
				t.Errorf("%s: the longest segments had %d bytes from the sandbox and %d to it, %d checksums were left to complete", address, longest[0], longest[1], partial)
				break
			}
		}
	}
}

// testSlowWire: a burst of more frames than the wire holds, into a network that reads
// slowly, loses nothing. A connection goes on meanwhile.
func (s *suite) testSlowWire(t *testing.T, sb engine.Sandbox) {
	l := newSlowLAN(t, sb, 1, 200*time.Microsecond)
	// A wire holds 900 of these frames, and gVisor's queue before it 1,000. Programs
	// in a microVM wait when both its queues are full. The answers may still be lost:
	// each ping receives the answers to all other pings, too, and may not read in
	// time.
	sh(t, sb, "ping -c 1 -W 60 10.0.2.2") // few packets are queued until a neighbour's address is known
	sh(t, sb, `
head -c 200000 /blob > /piece
(nc 10.0.2.2 7 < /piece > /back; echo $? > /done) </dev/null >/dev/null 2>&1 &
for i in $(seq 15); do
	ping -q -c 100 -i 0.001 -s 1300 -W 1 10.0.2.2 > /run/ping$i &
	pids="$pids $!"
done
wait $pids; true`)
	if got := sh(t, sb, "cat /run/ping* | grep -c '^100 packets transmitted'"); got != "15" {
		t.Errorf("%s of 15 have sent everything", got)
	}
	l.until(t, "all pings have come", func() bool { return l.pings == 1501 })
	if got := sh(t, sb, "while [ ! -s /done ]; do usleep 1000; done; cmp /piece /back && cat /done"); got != "0" {
		t.Errorf("a connection beside it: %q", got)
	}
}

// testPausedWire: a pause in the middle of a transfer does not change the transferred
// data.
func (s *suite) testPausedWire(t *testing.T, sb engine.Sandbox) {
	l := newLAN(t, sb, 1)
	sh(t, sb, "(nc 10.0.2.2 7 < /blob > /back; echo $? > /done) </dev/null >/dev/null 2>&1 &")
	for i := range 3 {
		l.until(t, "some of it has come", func() bool { return l.echoed > i*300_000 })
		if err := sb.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		resume(t, sb)
	}
	if got := sh(t, sb, "while [ ! -s /done ]; do usleep 1000; done; cmp /blob /back && cat /done"); got != "0" {
		t.Errorf("%q", got)
	}
}

// testAdoptedWire: whoever adopts a sandbox gets its wire, though nobody holds the
// end of its maker any more.
func (s *suite) testAdoptedWire(t *testing.T, sb engine.Sandbox, dir string) {
	l := newLAN(t, sb, 1)
	l.isReached(t, sb, "maker")
	l.end()
	sb = s.leave(t, sb, dir)
	l = newLAN(t, sb, 2) // before the adopter knows whether the sandbox stands still
	resume(t, sb)
	l.isReached(t, sb, "heir")
	l.end()
	l = newLAN(t, sb, 3) // another copy of the same wire
	l.isReached(t, sb, "network")
	if got := sh(t, sb, echoBlob("10.0.2.2")); got != "same" {
		t.Errorf("%q", got)
	}
	// Children of an adopted sandbox have wires of their own.
	children, _ := liveFork(t, sb, engine.ForkOptions{})
	newLAN(t, children[0], 4).isReached(t, children[0], "child")
}
