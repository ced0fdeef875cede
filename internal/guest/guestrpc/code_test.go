package guestrpc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"testing"
)

// codeGuest answers every source as if it printed and displayed itself.
type codeGuest struct{ *fakeGuest }

func (g *codeGuest) CodeRun(_ context.Context, req *CodeRunRequest, s *CodeStream) (CodeStatus, error) {
	if req.More {
		rest, err := io.ReadAll(s.Rest())
		if err != nil {
			return CodeStatus{}, err
		}
		req.Source += string(rest)
	}
	if req.Source == "refuse" {
		return CodeStatus{}, &Error{Code: CodeResourceExhausted, Message: "no"}
	}
	return g.show(s, req.Source, 0, 0)
}

func (g *codeGuest) CodeAttach(_ context.Context, req *CodeAttachRequest, s *CodeStream) (CodeStatus, error) {
	return g.show(s, req.ID, req.StdoutOffset, req.Event)
}

func (g *codeGuest) show(s *CodeStream, source string, from, event int64) (CodeStatus, error) {
	if err := s.Started(CodeStarted{ID: source[:min(len(source), 10)], Stdout: OutputStart{Offset: from}, Events: OutputStart{Offset: event}}); err != nil {
		return CodeStatus{}, err
	}
	result, err := marshal(nil, &CodeResult{Items: []CodeItem{{MIME: "text/plain", Data: []byte(source)}}})
	if err == nil {
		err = s.Send(&CodeEvent{Seq: uint64(event), Kind: CodeEventResult, Data: result})
	}
	for _, c := range []Channel{Stdout, Stderr} {
		if err == nil {
			err = s.WriteOutput(c, []byte(source))
		}
		if err == nil {
			err = s.CloseOutput(c)
		}
	}
	if err == nil {
		err = s.CloseOutput(Control)
	}
	return CodeStatus{State: CodeOK, Count: 1}, err
}

func (g *codeGuest) note(what string) error {
	g.fakeGuest.note(what)
	return nil
}

func (g *codeGuest) SetEnv(_ context.Context, req *SetEnvRequest) error {
	return g.note("env " + req.Env[0])
}
func (g *codeGuest) CodeInterrupt(_ context.Context, req *CodeInterruptRequest) error {
	return g.note("interrupt " + req.ID)
}
func (g *codeGuest) CodeRelease(_ context.Context, req *CodeReleaseRequest) error {
	return g.note("release " + req.ID)
}
func (g *codeGuest) CodeCreate(_ context.Context, req *CodeCreateRequest) (CodeContext, error) {
	return CodeContext{ID: req.ID, PID: 5}, nil
}
func (g *codeGuest) CodeList(context.Context) (CodeListReply, error) {
	return CodeListReply{Contexts: []CodeContext{{ID: "a"}, {ID: "b"}}}, nil
}
func (g *codeGuest) CodeRestart(_ context.Context, req *CodeContextRequest) error {
	return g.note("restart " + req.ID)
}
func (g *codeGuest) CodeClose(_ context.Context, req *CodeContextRequest) error {
	return g.note("close " + req.ID)
}

func TestCode(t *testing.T) {
	g := &codeGuest{newFakeGuest()}
	c := start(t, g)
	ctx := testContext(t)
	for _, size := range []int{1, maxCodeInline, maxCodeInline + 1, 3 << 20} {
		source := strings.Repeat("x", size)
		var out, errOut bytes.Buffer
		var events []CodeEvent
		status, err := c.RunCode(ctx, CodeRunRequest{Source: source}, &out, &errOut, func(e CodeEvent) error {
			events = append(events, e)
			return nil
		})
		if err != nil || status.Count != 1 || out.String() != source || errOut.String() != source || len(events) != 1 {
			t.Fatalf("%d bytes: %+v, %v, %d events", size, status, err, len(events))
		}
		if r, err := events[0].Result(); err != nil || len(r.Items) != 1 || string(r.Items[0].Data) != source {
			t.Errorf("%d bytes: %v", size, err)
		}
		if _, err := events[0].Begun(); err == nil {
			t.Error("a result was taken for a beginning")
		}
	}
	var own *Error
	if _, err := c.StartCode(ctx, CodeRunRequest{Source: "refuse"}); !errors.As(err, &own) || own.Code != CodeResourceExhausted {
		t.Errorf("refused: %v", err)
	}
	if _, err := c.StartCode(ctx, CodeRunRequest{Source: strings.Repeat("x", MaxCode+1)}); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("too large: %v", err)
	}
	x, err := c.AttachCode(ctx, CodeAttachRequest{ID: "seven", StdoutOffset: 7, Event: 9})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := x.Copy(nil, nil, nil); err != nil || x.ID() != "seven" || x.Resume() != (CodeAttachRequest{ID: "seven", StdoutOffset: 12, StderrOffset: 5, Event: 10}) {
		t.Errorf("%+v, %v", x.Resume(), err)
	}
	// An error of the caller's function is returned.
	failure := errors.New("disk full")
	if _, err := c.RunCode(ctx, CodeRunRequest{Source: "x"}, nil, nil, func(CodeEvent) error { return failure }); !errors.Is(err, failure) {
		t.Errorf("%v", err)
	}
	for _, err := range []error{
		c.SetEnv(ctx, SetEnvRequest{Env: []string{"A=b"}}), c.InterruptCode(ctx, CodeInterruptRequest{ID: "i"}), c.ReleaseCode(ctx, "r"),
		c.RestartContext(ctx, "s"), c.CloseContext(ctx, "c"),
	} {
		if err != nil {
			t.Error(err)
		}
	}
	g.mu.Lock()
	asked := g.calls
	g.mu.Unlock()
	if got := strings.Join(asked, ", "); got != "env A=b, interrupt i, release r, restart s, close c" {
		t.Errorf("%s", got)
	}
	if info, err := c.CreateContext(ctx, CodeCreateRequest{ID: "n"}); err != nil || info.ID != "n" || info.PID != 5 {
		t.Errorf("%+v, %v", info, err)
	}
	if list, err := c.ListContexts(ctx); err != nil || len(list) != 2 {
		t.Errorf("%+v, %v", list, err)
	}
	if s := fmt.Sprintf("%v %+v %#v", SetEnvRequest{Env: []string{"A=secret"}}, SetEnvRequest{Env: []string{"A=secret"}}, SetEnvRequest{Env: []string{"A=secret"}}); strings.Contains(s, "secret") {
		t.Errorf("shows %s", s)
	}
}

// malformedCodeEvents are bytes that no agent sends.
var malformedCodeEvents = [][]byte{
	{1}, {0, 0, 0, 0}, {1, 0, 0, 0}, {1, 0, 0, 0, 9}, {0xff, 0xff, 0xff, 0xff}, {0, 0, 0x40, 0, 1, 2, 3}, {5, 0, 0, 0, 1, 0, 2, 0, 0xff},
}

func TestMalformedCodeEvents(t *testing.T) {
	for _, b := range malformedCodeEvents {
		_, err := readCodeEvent(bytes.NewReader(b))
		var own *Error
		if !errors.As(err, &own) || own.Code != CodeInternal {
			t.Errorf("%x: %v", b, err)
		}
	}
	if _, err := readCodeEvent(bytes.NewReader(nil)); !errors.Is(err, io.EOF) {
		t.Errorf("nothing: %v", err)
	}
}

func FuzzCodeEvents(f *testing.F) {
	for _, b := range malformedCodeEvents {
		f.Add(b)
	}
	for _, data := range []message{&CodeBegun{Fresh: true}, &CodeResult{Items: []CodeItem{{MIME: "a", Data: []byte("b")}}}, &CodeError{Name: "n"}} {
		inner, err := marshal(nil, data)
		if err != nil {
			f.Fatal(err)
		}
		b, err := marshal([]byte{0, 0, 0, 0}, &CodeEvent{Seq: 1, Kind: CodeEventResult, Data: inner})
		if err != nil {
			f.Fatal(err)
		}
		binary.LittleEndian.PutUint32(b, uint32(len(b)-4))
		f.Add(append(b, b...))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		r := bytes.NewReader(in)
		for {
			e, err := readCodeEvent(r)
			if err != nil {
				return
			}
			if begun, err := e.Begun(); err == nil {
				if b, err := begun.Bytes(); err != nil || !bytes.Equal(b, e.Data) && e.Data[0] == messageVersion {
					t.Fatalf("%x became %x, %v", e.Data, b, err)
				}
			}
			if r, err := e.Result(); err == nil && len(r.Items) > maxCodeItems {
				t.Fatalf("%d items", len(r.Items))
			}
			if _, err := e.Error(); err == nil && len(e.Data) == 0 {
				t.Fatal("an error of nothing")
			}
		}
	})
}
