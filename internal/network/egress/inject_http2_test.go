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

// overHTTP2 is a program in the sandbox that speaks with the host over one connection of
// HTTP/2. Requests wait until it is there.
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

// TestInjectFirstRequests: requests that come while the first one still gets the connection to
// the server share it: none is told to connect anew.
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

// TestInjectManyStreams: requests of one HTTP/2 connection do not get each other's answers.
func TestInjectManyStreams(t *testing.T) {
	n := newInjecting(t, allow("allowed.example:443"))
	client := n.overHTTP2(t)
	// Go's client waits for ever if more requests than the 100 that the other side allows come
	// at once (net/http counts those that wait as if they were under way).
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
