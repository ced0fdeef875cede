package template

import (
	"bytes"
	"strings"
	"testing"
)

func TestListening(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:0050 0100007F:1F91 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 100 0 0 10 0
   2: 00000000000000000000000001000000:01BB 00000000000000000000000000000000:0000 0A 0 0 0 0
`
	for port, want := range map[uint16]bool{8080: true, 80: false, 443: true, 8081: false, 0x90: false} {
		if got := listening(table, port); got != want {
			t.Errorf("port %d: %v", port, got)
		}
	}
}

// TestExplain: an error has the last line of the output, and says so when the
// network seems to be missing.
func TestExplain(t *testing.T) {
	for output, want := range map[string]string{
		"":                  "",
		"one\ntwo\n":        ": two",
		"only":              ": only",
		"a\nE: Failed\n \n": ": E: Failed",
		"WARNING: Retrying: Failed to establish a new connection: [Errno -3] Temporary failure in name resolution\nERROR: No matching distribution found for x\n": "network",
		"curl: (6) Could not resolve host: example.org":         "network",
		"dial tcp 1.2.3.4:443: connect: network is unreachable": "network",
	} {
		got := explain([]byte(output))
		if want == "network" {
			if !strings.Contains(got, "the network were missing") {
				t.Errorf("%q is explained as %q", output, got)
			}
		} else if got != want {
			t.Errorf("%q is explained as %q, not %q", output, got, want)
		}
	}
}

func TestTail(t *testing.T) {
	var l tail
	for i := range 3 * tailSize {
		if _, err := l.Write([]byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if len(l.bytes) != tailSize || !bytes.Equal(l.bytes[tailSize-2:], []byte{0xfe, 0xff}) {
		t.Errorf("%d bytes, ending with %x", len(l.bytes), l.bytes[len(l.bytes)-2:])
	}
}
