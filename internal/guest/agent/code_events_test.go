package agent

import (
	"io"
	"testing"

	"agentrun.dev/internal/guest/guestrpc"
)

func TestEventLogWaitsForReaders(t *testing.T) {
	l := newEventLog()
	big := guestrpc.CodeEvent{Data: make([]byte, maxEventLog/4)}
	r, err := l.attach(0)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		l.add(nil, big)
	}
	if l.tryAdd(big, true) {
		t.Fatal("an event that nobody has read made room")
	}
	added := make(chan struct{})
	go func() { l.add(nil, big); close(added) }()
	if e, err := r.read(nil); err != nil || e.Seq != 0 {
		t.Fatalf("%d, %v", e.Seq, err)
	}
	await(t, added, "room after a read")
	if got := l.total(); got != (guestrpc.OutputTotal{Bytes: 4}) {
		t.Errorf("%+v", got)
	}
	// A reader that leaves blocks nothing, nor does a reader after the interpreter's
	// death.
	added = make(chan struct{})
	go func() { l.add(nil, big); close(added) }()
	r.close()
	await(t, added, "room after a close")
	if r, err = l.attach(0); err != nil || r.start.Dropped != 2 || r.start.Offset != 2 {
		t.Fatalf("%+v, %v", r.start, err)
	}
	dead := make(chan struct{})
	close(dead)
	l.add(dead, big)
	if got := l.total(); got != (guestrpc.OutputTotal{Bytes: 6, Dropped: 2}) {
		t.Errorf("%+v", got)
	}
	l.end()
	l.add(nil, big) // it comes too late, and does not wait
	for want := uint64(3); want < 6; want++ {
		if e, err := r.read(nil); err != nil || e.Seq != want {
			t.Errorf("%d, %v, want %d", e.Seq, err, want)
		}
	}
	if _, err := r.read(nil); err != io.EOF {
		t.Errorf("%v", err)
	}
	for range maxReaders - 1 {
		if _, err := l.attach(FromEnd); err != nil {
			t.Fatal(err)
		}
	}
	_, err = l.attach(FromEnd)
	wantKind(t, err, ErrTooMany)
}
