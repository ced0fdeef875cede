package egress

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/http2"
)

// TestInjectFirstRequests: requests that come while the first one still gets the connection to
// the server share it: none is told to connect anew.
func TestInjectFirstRequests(t *testing.T) {
	const rounds, requests = 10, 50
	n := newInjecting(t, allow("allowed.example:443"))
	for range rounds {
		conn, err := n.dialTLS(t, "allowed.example", alpnHTTP2)
		if err != nil {
			t.Fatal(err)
		}
		client, err := (&http2.Transport{}).NewClientConn(conn)
		if err != nil {
			t.Fatal(err)
		}
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
