package agent

import (
	"bytes"
	"errors"
	"io"
	"os"
	"sync"
	"testing"

	"agentrun.dev/internal/guest/guestrpc"
)

// listener is an interpreter of which only the agent's end exists.
func listener() *interpreterProcess {
	k := &interpreterProcess{
		proc: &Process{done: make(chan struct{})}, requests: unheard(), stdout: &interpreterStream{}, stderr: &interpreterStream{},
		ready: make(chan struct{}), begin: make(chan struct{}, 1), done: make(chan executionEnd, 1),
	}
	k.log.Store(newEventLog())
	return k
}

// unheard takes requests that are never read.
var unheard = sync.OnceValue(func() *input {
	f, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		panic(err)
	}
	in, err := newInput(f, false)
	if err != nil {
		panic(err)
	}
	return in
})

var (
	readyFrame = []byte{3, 0, 0, 0, frameReady, 1, '3'}
	beginFrame = []byte{1, 0, 0, 0, frameBegin}
	doneFrame  = []byte{4, 0, 0, 0, frameDone, 1, 2, 0}
	eventFrame = []byte{4, 0, 0, 0, frameEvent, 3, 1, 0}
)

// badFrames end an interpreter that is ready.
var badFrames = map[string]error{
	"\x00\x00\x00\x00":                                          errInterpreterFrame,
	"\x03\x00\x40\x00x":                                         errInterpreterFrame, // a byte too many
	"\xff\xff\xff\xffx":                                         errInterpreterFrame,
	string(readyFrame):                                          errInterpreterOrder,
	"\x01\x00\x00\x00\x09":                                      errInterpreterField,
	"\x01\x00\x00\x00\x04":                                      errInterpreterField,
	"\x04\x00\x00\x00\x04\x09\x00\x00":                          errInterpreterField, // no such state
	"\x04\x00\x00\x00\x04\x00\x00\x02":                          errInterpreterField, // no such language
	"\x05\x00\x00\x00\x04\x00\x00\x00\x00":                      errInterpreterField,
	"\x08\x00\x00\x00\x04\x00\xff\xff\xff\xff\x7f\x00":          errInterpreterField, // an exit code of 2^34
	"\x01\x00\x00\x00\x03":                                      errInterpreterField,
	"\x02\x00\x00\x00\x03\x01":                                  errInterpreterField, // only the agent says begun
	"\x02\x00\x00\x00\x03\x05":                                  errInterpreterField,
	string(doneFrame) + string(doneFrame):                       errInterpreterOrder,
	string(beginFrame) + string(beginFrame):                     errInterpreterOrder,
	"\x05\x00\x00\x00\x04":                                      io.EOF,
	"\x05\x00":                                                  io.EOF,
	"\x02\x00\x00\x00\x05\x01":                                  errInterpreterField,
	string(beginFrame) + string(eventFrame) + string(doneFrame): io.EOF,
}

func TestInterpreterFrames(t *testing.T) {
	for in, want := range badFrames {
		if err := listener().readFrames(io.MultiReader(bytes.NewReader(readyFrame), bytes.NewReader([]byte(in)))); !errors.Is(err, want) {
			t.Errorf("%x: %v, want %v", in, err, want)
		}
	}
	if err := listener().readFrames(bytes.NewReader(beginFrame)); !errors.Is(err, errInterpreterOrder) {
		t.Errorf("begun before it was ready: %v", err)
	}
	idle := listener()
	idle.log.Store(nil)
	if err := idle.readFrames(bytes.NewReader(append(readyFrame, doneFrame...))); !errors.Is(err, errInterpreterOrder) {
		t.Errorf("done before it was asked: %v", err)
	}
	for in, want := range map[string]error{
		"begin\n": errInterpreterOrder, "ready 5\nready 5\n": errInterpreterOrder, "ready 5\nwhat\n": errInterpreterField, "ready 5\n\n": errInterpreterField,
		"ready 5\ndone x \n": errInterpreterField, "ready 5\ndone 256 \n": errInterpreterField, "ready 5\ndone 0 \ndone 0 \n": errInterpreterOrder,
		"ready 5\nbegin\nbegin\n": errInterpreterOrder, "ready 5\nbegin\ndone 3 1\n": io.EOF, "rea": io.EOF,
		"ready " + string(make([]byte, 2*maxShellLine)): errInterpreterFrame,
	} {
		if err := listener().readLines(bytes.NewReader([]byte(in))); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", in, err, want)
		}
	}
}

func FuzzInterpreterFrames(f *testing.F) {
	for in := range badFrames {
		f.Add(false, append(bytes.Clone(readyFrame), in...))
	}
	f.Add(true, []byte("ready 5\nbegin\ndone 3 1\n"))
	f.Fuzz(func(t *testing.T, shell bool, in []byte) {
		k := listener()
		read := k.readFrames
		if shell {
			read = k.readLines
		}
		if err := read(bytes.NewReader(in)); err == nil {
			t.Fatal("no end")
		}
		if n := k.log.Load().bytes(); n > len(in)*(eventOverhead+1) {
			t.Fatalf("%d bytes became %d", len(in), n)
		}
		select {
		case r := <-k.done:
			if r.state > guestrpc.CodeExited {
				t.Fatalf("%+v", r)
			}
		default:
		}
	})
}
