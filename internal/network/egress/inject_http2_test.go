package egress

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"
)

// overHTTP2 is a program in the sandbox that speaks with the host over one HTTP/2
// connection. Requests wait for the connection.
func (n *injecting) overHTTP2(t *testing.T) *http.Transport {
	t.Helper()
	protocols := new(http.Protocols)
	protocols.SetHTTP2(true)
	program := &http.Transport{
		MaxConnsPerHost: 1, Protocols: protocols, HTTP2: &http.HTTP2Config{StrictMaxConcurrentRequests: true},
		DialTLSContext: func(context.Context, string, string) (net.Conn, error) {
			return n.dialTLS(t, "allowed.example", alpnHTTP2)
		},
	}
	t.Cleanup(program.CloseIdleConnections)
	return program
}

// TestInjectFirstRequests: requests that come while the first one is still opening
// the connection to the server share that connection. No request is told to
// reconnect.
func TestInjectFirstRequests(t *testing.T) {
	const rounds, requests = 10, 50
	n := newInjecting(t, allow("allowed.example:443"))
	for range rounds {
		client := n.overHTTP2(t)
		var wait sync.WaitGroup
		for i := range requests {
			wait.Go(func() {
				r, _ := http.NewRequest(http.MethodPost, "https://allowed.example/", strings.NewReader(fmt.Sprint(i)))
				r.Header.Set("Authorization", "Bearer "+thePlaceholder)
				answer, err := client.RoundTrip(r)
				if err != nil {
					t.Error(err)
					return
				}
				defer func() { _ = answer.Body.Close() }()
				if said, err := io.ReadAll(answer.Body); err != nil || string(said) != "served" {
					t.Errorf("%s: %q %v", answer.Status, said, err)
				}
			})
		}
		wait.Wait()
		client.CloseIdleConnections()
	}
	if got, _ := n.reached(); len(got) != rounds*requests {
		t.Errorf("the server got %d of %d requests", len(got), rounds*requests)
	}
}

// TestInjectFewStreams: a server that allows few requests at a time gets all of many
// simultaneous requests, and never more at a time than it allows.
func TestInjectFewStreams(t *testing.T) {
	const allowed, requests = 3, 60
	n := newInjecting(t, allow("allowed.example:443"))
	n.mu.Lock()
	n.streams.MaxConcurrentStreams = allowed
	n.mu.Unlock()
	client := n.overHTTP2(t)
	var wait sync.WaitGroup
	for i := range requests {
		wait.Go(func() {
			r, _ := http.NewRequest(http.MethodPost, "https://allowed.example/", strings.NewReader(fmt.Sprint(i)))
			r.Header.Set("Authorization", "Bearer "+thePlaceholder)
			answer, err := client.RoundTrip(r)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = answer.Body.Close() }()
			if said, err := io.ReadAll(answer.Body); err != nil || string(said) != "served" {
				t.Errorf("%s: %q %v", answer.Status, said, err)
			}
		})
	}
	wait.Wait()
	if got, bodies := n.reached(); len(got) != requests || len(slices.Compact(slices.Sorted(slices.Values(bodies)))) != requests {
		t.Errorf("the server got %d of %d requests", len(got), requests)
	}
}

// TestInjectOpenedAhead: the server sees a connection without a request so far, and
// does not time it out as silent.
func TestInjectOpenedAhead(t *testing.T) {
	n := newInjecting(t, allow("allowed.example:443"))
	conn, err := n.dialTLS(t, "allowed.example", alpnHTTP2)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	<-n.greeted
}

// TestFirstFrame: the limit counts as known when the reader of the first frame reads
// on, however the frame is cut.
func TestFirstFrame(t *testing.T) {
	frames := []byte{0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 7, 0, 0, 0, 4, 1, 0, 0, 0, 0}
	for size := 1; size <= len(frames); size++ {
		ours, theirs := net.Pipe()
		f := &firstFrame{Conn: ours, done: make(chan struct{})}
		go func() {
			_, _ = theirs.Write(frames)
			_ = theirs.Close()
		}()
		for read, buffer := 0, make([]byte, size); ; {
			known := false
			n, err := f.Read(buffer)
			select {
			case <-f.done:
				known = true
			default:
			}
			if whole := 15; known != (err != nil || read >= whole) {
				t.Errorf("by %d bytes: with %d taken in, known is %v", size, read, known)
			}
			if err != nil {
				break
			}
			read += n
		}
		_ = ours.Close()
	}
}

// FuzzFirstFrame: for any first bytes of a server, in any pieces, the limit counts as
// known only after the first frame has been read.
func FuzzFirstFrame(f *testing.F) {
	f.Add([]byte{0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 7, 1}, uint8(3))
	f.Add([]byte{255, 255, 255, 4, 0}, uint8(0))
	f.Fuzz(func(t *testing.T, sent []byte, size uint8) {
		piece := int(size) + 1
		first := &firstFrame{}
		for rest := sent; len(rest) > 0; {
			n := min(piece, len(rest))
			first.note(rest[:n])
			rest = rest[n:]
		}
		whole := len(sent) >= frameHead && len(sent)-frameHead >= int(sent[0])<<16|int(sent[1])<<8|int(sent[2])
		if got := len(first.head) == frameHead && first.left == 0; got != whole {
			t.Errorf("% x in pieces of %d: read whole: %v", sent, piece, got)
		}
	})
}

// TestInjectManyStreams: requests of one HTTP/2 connection do not get each other's answers.
func TestInjectManyStreams(t *testing.T) {
	n := newInjecting(t, allow("allowed.example:443"))
	client := n.overHTTP2(t)
	// Go's client waits forever if more requests come at once than the 100 that the
	// other side allows (net/http counts waiting requests as if they were under way).
	var wait errgroup.Group
	wait.SetLimit(64)
	for i := range 150 {
		wait.Go(func() error {
			r, _ := http.NewRequest(http.MethodPost, "https://allowed.example/", strings.NewReader(fmt.Sprint(i)))
			r.Header.Set("Authorization", "Bearer "+thePlaceholder)
			answer, err := client.RoundTrip(r)
			if err != nil {
				return err
			}
			defer func() { _ = answer.Body.Close() }()
			if said, err := io.ReadAll(answer.Body); err != nil || string(said) != "served" {
				t.Errorf("%q %v", said, err)
			}
			return nil
		})
	}
	if err := wait.Wait(); err != nil {
		t.Error(err)
	}
	got, bodies := n.reached()
	slices.Sort(bodies)
	if bodies = slices.Compact(bodies); len(got) != 150 || len(bodies) != 150 {
		t.Errorf("the server got %d requests, %d of them different", len(got), len(bodies))
	}
	for _, r := range got {
		if r.Header.Get("Authorization") != "Bearer "+theValue {
			t.Errorf("the server got %v", r.Header)
		}
	}
}
