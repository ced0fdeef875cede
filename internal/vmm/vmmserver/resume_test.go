package vmmserver

import (
	"bytes"
	"testing"

	"agentrun.dev/internal/vmm/vmmctl"
)

// TestResumeTells: the reply to Resume says whether the machine stood still.
func TestResumeTells(t *testing.T) {
	p := serve(t)
	send(t, p.Conn, &vmmctl.Boot{Memory: memory, VCPUs: 1}, open(t, "/dev/kvm"), bareGuest(t))
	if r := answer(t, p.Conn, 0); r.Error != "" {
		t.Fatal(r.Error)
	}
	for i, step := range []struct {
		kind vmmctl.Kind
		data []byte
	}{
		{vmmctl.KindResume, []byte{0}},
		{vmmctl.KindPause, nil}, {vmmctl.KindPause, nil}, {vmmctl.KindResume, []byte{1}}, {vmmctl.KindResume, []byte{0}},
		{vmmctl.KindPark, nil}, {vmmctl.KindResume, []byte{1}},
	} {
		send(t, p.Conn, &vmmctl.Simple{Kind: step.kind, ID: uint64(i + 1)})
		if r := answer(t, p.Conn, uint64(i+1)); r.Error != "" || !bytes.Equal(r.Data, step.data) {
			t.Errorf("step %d: %q, data %v, not %v", i, r.Error, r.Data, step.data)
		}
	}
}
