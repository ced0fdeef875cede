package guestrpc

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"
)

// secret is entropy that is easy to find in printed text.
var secret = bytes.Repeat([]byte("secret"), 8)

func renewal(generation uint64) *RenewRequest {
	return &RenewRequest{
		Entropy: bytes.Clone(secret), WallClock: time.Unix(1700000000, 5), Hostname: "fork-1",
		MachineID: strings.Repeat("0f", 16), Generation: generation,
	}
}

// expectNoSecret searches for the entropy in every notation.
func expectNoSecret(t *testing.T, text string) {
	t.Helper()
	for _, shown := range []string{"secret", hex.EncodeToString(secret[:4]), strings.ToUpper(hex.EncodeToString(secret[:4])), "115 101 99 114", "0x73, 0x65", "c2VjcmV0"} {
		if strings.Contains(text, shown) {
			t.Errorf("the entropy is shown: %q", text)
		}
	}
}

// malformedRenewals are bodies that are not a RenewRequest.
var malformedRenewals = map[string][]byte{
	"no message":        {},
	"version 0":         {0},
	"cut entropy":       append([]byte{1, 64}, secret...),
	"entropy of 1025":   concat([]byte{1, 0x81, 8}, bytes.Repeat(secret, 30)[:MaxEntropy+1], []byte{0, 0, 0, 1}),
	"entropy of 4 GiB":  append([]byte{1, 0xff, 0xff, 0xff, 0xff, 0x0f}, secret...),
	"a clock past 2262": concat([]byte{1, 48}, secret, []byte{0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 1}, []byte{0, 0, 1}),
	"a long host name":  concat([]byte{1, 48}, secret, []byte{0, 0x81, 2}, make([]byte, maxShort+1), []byte{0, 1}),
	"a long machine id": concat([]byte{1, 48}, secret, []byte{0, 0, 33}, bytes.Repeat([]byte("f"), 33), []byte{1}),
	"no generation":     concat([]byte{1, 48}, secret, []byte{0, 0, 0}),
	"bytes at the end":  concat([]byte{1, 48}, secret, []byte{0, 0, 0, 1}, secret),
}

// malformedRenewReplies are bodies that are not a RenewReply.
var malformedRenewReplies = map[string][]byte{
	"no message":        {},
	"version 0":         {0, 1, 2},
	"no generation":     {1},
	"no step":           {1, 1},
	"generation > 2^64": {1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 0},
	"bytes at the end":  {1, 1, 2, 3},
}

func TestRenew(t *testing.T) {
	g := newFakeGuest()
	c := start(t, g)
	ctx := testContext(t)
	req := renewal(3)
	reply, err := c.Renew(ctx, *req)
	if err != nil || reply != (RenewReply{Generation: 3, ClockStep: -time.Second}) {
		t.Fatalf("%+v, %v", reply, err)
	}
	g.mu.Lock()
	if len(g.renewed) != 1 || !reflect.DeepEqual(&g.renewed[0], req) || !bytes.Equal(req.Entropy, secret) {
		t.Errorf("the guest got %v", g.renewed)
	}
	g.mu.Unlock()
	if _, err := c.Renew(ctx, *req); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("the same generation: %v", err)
	} else {
		expectNoSecret(t, err.Error())
	}
	// A request that cannot be sent is refused here, and the session goes on.
	for name, change := range map[string]func(*RenewRequest){
		"entropy": func(r *RenewRequest) { r.Entropy = bytes.Repeat(secret, 30) },
		"clock":   func(r *RenewRequest) { r.WallClock = time.Unix(-1, 0) },
	} {
		bad := renewal(9)
		change(bad)
		if _, err := c.Renew(ctx, *bad); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		} else {
			expectNoSecret(t, err.Error())
		}
	}
	if _, err := c.Renew(ctx, RenewRequest{Generation: 10}); err != nil {
		t.Errorf("nothing but a generation: %v", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if n := len(g.renewed); n != 2 || !g.renewed[1].WallClock.IsZero() {
		t.Errorf("the guest got %v", g.renewed)
	}
}

func TestRenewNumber(t *testing.T) {
	if MethodRenew != 64 || MethodRenew.streaming() || MethodRenew.toGuest() != 0 || MethodRenew.toHost() != 0 {
		t.Error("the number and kind of the call are part of the protocol")
	}
}

// TestEntropyIsWipedFromTheReadBuffer checks that a renewal leaves no entropy behind.
func TestEntropyIsWipedFromTheReadBuffer(t *testing.T) {
	srv := &server{handler: newFakeGuest()}
	srv.s.w.init(io.Discard, nil, func(error) {})
	good, err := marshal(nil, renewal(1))
	if err != nil {
		t.Fatal(err)
	}
	for name, body := range map[string][]byte{"good": good, "bad": append(bytes.Clone(good), 1)} {
		srv.renew(1, body)
		if !bytes.Equal(body, make([]byte, len(body))) {
			t.Errorf("%s: left %q", name, body)
		}
	}
}

// silentGuest renews nothing. Its later answers are longer than the first.
type silentGuest struct {
	Handler
	reply RenewReply
}

func (g *silentGuest) Renew(context.Context, *RenewRequest) (RenewReply, error) {
	reply := g.reply
	g.reply = RenewReply{Generation: math.MaxUint64, ClockStep: math.MaxInt64}
	return reply, nil
}

// TestRenewAllocatesNothing: a renewal allocates nothing, since memory that is
// allocated in a fork is the fork's own.
func TestRenewAllocatesNothing(t *testing.T) {
	host, guest := socketPair(t)
	srv := &server{handler: &silentGuest{}}
	srv.s.init(guest, serverWindow, srv.idleBuffer[:])
	body, err := marshal(nil, renewal(1))
	if err != nil {
		t.Fatal(err)
	}
	sent, reply, id := make([]byte, len(body)), make([]byte, 64), uint32(1)
	if n := testing.AllocsPerRun(1, func() { // the first call does not count; in a guest it is Prepare
		copy(sent, body)
		id += 2
		srv.renew(id, sent)
		if n, err := host.Read(reply); err != nil || frameType(reply[0]) != frameReply {
			t.Fatalf("%q, %v", reply[:n], err)
		}
	}); n != 0 {
		t.Errorf("a renewal allocates %v times", n)
	}
}

func TestEntropyIsNeverPrinted(t *testing.T) {
	req := *renewal(7)
	asJSON, err := json.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	var logged bytes.Buffer
	slog.New(slog.NewTextHandler(&logged, nil)).Info("x", "req", req, "ptr", &req)
	slog.New(slog.NewJSONHandler(&logged, nil)).Info("x", "req", req, "ptr", &req)
	texts := []string{req.String(), string(asJSON), logged.String(), fmt.Sprint(req), fmt.Sprint(&req)}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X"} {
		texts = append(texts, fmt.Sprintf(verb, req), fmt.Sprintf(verb, &req),
			fmt.Sprintf(verb, []RenewRequest{req}), fmt.Sprintf(verb, struct{ R RenewRequest }{req}))
	}
	for _, text := range texts {
		expectNoSecret(t, text)
	}
	want := `RenewRequest{Entropy: 48 bytes, WallClock: 2023-11-14T22:13:20.000000005Z, Hostname: "fork-1", MachineID: "` +
		strings.Repeat("0f", 16) + `", Generation: 7}`
	if req.String() != want {
		t.Errorf("got %s, want %s", req, want)
	}
	if got := (RenewRequest{}).String(); got != `RenewRequest{Entropy: 0 bytes, WallClock: , Hostname: "", MachineID: "", Generation: 0}` {
		t.Error(got)
	}
}

func TestHostileRenewReply(t *testing.T) {
	answers := map[string][]byte{
		"HEADERS":      frame(frameHeaders, 0, 1, 1),
		"DATA":         frame(frameData, Stdout, 1, 1),
		"another call": frame(frameReply, 0, 3, 1, 1, 2),
	}
	for name, b := range malformedRenewReplies {
		answers[name] = frame(frameReply, 0, 1, b...)
	}
	for name, in := range answers {
		t.Run(name, func(t *testing.T) {
			c := dialHostile(t, in)
			reply, err := c.Renew(testContext(t), *renewal(1))
			if err == nil {
				t.Fatalf("got %+v", reply)
			}
			expectNoSecret(t, err.Error())
		})
	}
}

func TestClockEncoding(t *testing.T) {
	for _, want := range []time.Time{{}, time.Unix(0, 1), time.Unix(0, math.MaxInt64), time.Now(), time.Now().UTC()} {
		b, err := marshal(nil, &RenewRequest{WallClock: want})
		if err != nil {
			t.Fatal(err)
		}
		var got RenewRequest
		if err := unmarshal(b, &got); err != nil || !got.WallClock.Equal(want) || got.WallClock.IsZero() != want.IsZero() {
			t.Errorf("%v became %v, %v", want, got.WallClock, err)
		}
	}
}
