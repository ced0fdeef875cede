package gvisorctl

import (
	"errors"
	"io"
	"net/netip"
	"os"
	"reflect"
	"testing"

	"agentrun.dev/internal/vmm/vmmctl"
)

func TestMessages(t *testing.T) {
	ours, theirs, err := vmmctl.Pair()
	if err != nil {
		t.Fatal(err)
	}
	a, err := NewConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewConn(theirs)
	if err != nil {
		t.Fatal(err)
	}
	sent := &Message{
		ID: 7, Op: OpCreate, Create: &Create{ID: "x", Memory: 1 << 30, VCPUs: 2, DNS: []netip.Addr{netip.MustParseAddr("9.9.9.9")}}, Data: []byte{0, 1},
		// An invalid gateway must stay invalid.
		Network: &Network{MAC: [6]byte{2}, MTU: 1500, Address: netip.MustParsePrefix("10.0.2.15/24")},
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(a.Send(sent, null), null.Close()); err != nil {
		t.Fatal(err)
	}
	got, files, err := b.Receive()
	if err != nil || len(files) != 1 || !reflect.DeepEqual(got, sent) {
		t.Fatalf("%+v, %d files, %v", got, len(files), err)
	}
	if err := files[0].Close(); err != nil {
		t.Error(err)
	}
	if err := a.SendBytes([]byte("{")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.Receive(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("nonsense: %v", err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.Receive(); !errors.Is(err, io.EOF) {
		t.Errorf("the other end is gone: %v", err)
	}
}
