package egress

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/http2"
)

// dialHTTP2 is one connection of a program in the sandbox with the host. An http.Client would
// make one for each request that comes before the first connection is there.
func (n *injecting) dialHTTP2(t *testing.T) *http2.ClientConn {
	t.Helper()
	conn, err := n.dialTLS(t, "allowed.example", alpnHTTP2)
	if err != nil {
		t.Fatal(err)
	}
	client, err := (&http2.Transport{StrictMaxConcurrentStreams: true}).NewClientConn(conn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// TestInjectFirstRequests: requests that come while the first one still gets the connection to
// the server share it: none is told to connect anew.
func TestInjectFirstRequests(t *testing.T) {
	const rounds, requests = 10, 50
	n := newInjecting(t, allow("allowed.example:443"))
	for range rounds {
		client := n.dialHTTP2(t)
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
		_ = client.Close()
	}
	if got, _ := n.reached(); len(got) != rounds*requests {
		t.Errorf("the server got %d of %d requests", len(got), rounds*requests)
	}
}

// TestInjectManyStreams: requests of one HTTP/2 connection do not get each other's answers.
func TestInjectManyStreams(t *testing.T) {
	n := newInjecting(t, allow("allowed.example:443"))
	client := n.dialHTTP2(t)
	var wait sync.WaitGroup
	for i := range 150 {
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
				t.Errorf("%q %v", said, err)
			}
		})
	}
	wait.Wait()
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
