package netds

import (
	"context"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/node/authority"
)

// TestSettings: a file, the host's DNS servers, and the defaults without
// either.
func TestSettings(t *testing.T) {
	dir := t.TempDir()
	file, resolv := filepath.Join(dir, "network.yaml"), filepath.Join(dir, "resolv.conf")
	if err := os.WriteFile(resolv, []byte("search example.org\nnameserver 192.0.2.1\nnameserver fe80::1%eth0\nnameserver 2001:db8::1\n#nameserver 192.0.2.9\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := OpenSettings(file, resolv)
	if err != nil {
		t.Fatal(err)
	}
	v := s.Now()
	want := []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:53"), netip.MustParseAddrPort("[2001:db8::1]:53")}
	if !slices.Equal(v.Upstreams, want) || v.ECH || len(v.ClosedRanges) != 0 {
		t.Errorf("without a file: %+v", v)
	}
	if got := policy.Texts(v.BuildNetwork.Allow); !slices.Contains(got, "pypi.org:443") || v.BuildNetwork.Egress != policy.DenyByDefault {
		t.Errorf("builds may reach %v", v.BuildNetwork)
	}
	roots := filepath.Join(dir, "roots.pem")
	ca, err := authority.New("x", nil, time.Now())
	if err == nil {
		err = os.WriteFile(roots, ca.Certificate(), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	text := `
upstreams: [192.0.2.53, "192.0.2.54:5353"]
closedRanges: [10.96.0.0/12]
internalDomains: {cluster.local: [10.96.0.10]}
buildNetwork: {egress: allow, deny: [evil.example]}
ech: true
injectRoots: ` + roots + `
bandwidth: {up: 10Mi, down: "25000000"}
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err = OpenSettings(file, resolv); err != nil {
		t.Fatal(err)
	}
	v = s.Now()
	netd := v.forNetd()
	if len(netd.Upstreams) != 2 || netd.Upstreams[1].Port() != 5353 || netd.ClosedRanges[0].String() != "10.96.0.0/12" ||
		netd.InternalDomains[0].Domain != "cluster.local" || !v.ECH || v.BuildNetwork.Egress != policy.AllowByDefault ||
		string(netd.Roots) != string(ca.Certificate()) || netd.Defaults != (netctl.Limits{Up: 10 << 20, Down: 25_000_000}) {
		t.Errorf("%+v", v)
	}
	for bad, says := range map[string]string{
		"upstream: [192.0.2.1]":        "upstream",
		"injectRoots: /none":           "injectRoots",
		"bandwidth: {up: 0}":           "bandwidth: up: 0: give bytes per second, from 64Ki",
		"bandwidth: {down: 63Ki}":      "bandwidth: down",
		"bandwidth: {down: 2Ti}":       "bandwidth: down",
		"bandwidth: {up: 1500m}":       "bandwidth: up",
		"bandwidth: {up: fast}":        "quantities must match",
		"bandwidth: {upwards: 1Gi}":    "upwards",
		"injectRoots: " + resolv:       "no CA certificate",
		"upstreams: [example.org]":     "upstreams",
		"closedRanges: [10.0.0.0/33]":  "closedRanges",
		"internalDomains: {a.b: []}":   "a.b",
		"buildNetwork: {egress: ask}":  "ask",
		"buildNetwork: {allow: ['*']}": "allow[0]",
	} {
		if err := os.WriteFile(file, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenSettings(file, resolv); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// ofNobody is a host without addresses.
type ofNobody struct{}

func (ofNobody) Owns(netip.Addr) (bool, string, error) { return false, "", nil }

// TestSettingsFollow: a change of the file is acted on, one that makes no sense is not.
// A guard of addresses follows, too.
func TestSettingsFollow(t *testing.T) {
	file := filepath.Join(t.TempDir(), "network.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		s, err := OpenSettings(file, "")
		if err != nil {
			t.Fatal(err)
		}
		guard := addresses.NewGuard(ofNobody{}, nil)
		s.Follow(guard)
		ctx, cancel := context.WithCancel(t.Context())
		changed := make(chan struct{})
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			s.watch(ctx, slog.New(slog.NewTextHandler(io.Discard, nil)), func(context.Context) { changed <- struct{}{} })
		}()
		write("ech: true")
		<-changed
		if !s.Now().ECH {
			t.Error("a change is not seen")
		}
		write("ech: perhaps")
		time.Sleep(2 * look) // of the bubble
		if !s.Now().ECH {
			t.Error("a file that makes no sense changes settings")
		}
		write("closedRanges: [8.8.0.0/16]")
		<-changed
		if s.Now().ECH || len(s.Now().ClosedRanges) != 1 {
			t.Errorf("%+v", s.Now())
		}
		if v := guard.Check(netip.MustParseAddr("8.8.8.8")); v.Class != addresses.NodeRange {
			t.Errorf("the guard that follows says %+v", v)
		}
		guard = addresses.NewGuard(ofNobody{}, nil)
		s.Follow(guard)
		if v := guard.Check(netip.MustParseAddr("8.8.8.8")); !v.Closed() {
			t.Error("a guard that follows later does not know what is closed")
		}
		cancel()
		<-ended
	})
}

// TestSettingsThatAreGone: if a file is deleted, emptied or unreadable, the ranges that it had
// closed stay closed. The log says so once, and the next good file applies.
func TestSettingsThatAreGone(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "network.yaml")
	put := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	remove := func() {
		if err := os.RemoveAll(file); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		put("closedRanges: [192.0.2.0/24]")
		s, err := OpenSettings(file, "")
		if err != nil {
			t.Fatal(err)
		}
		var log words
		ctx, cancel := context.WithCancel(t.Context())
		changed, ended := make(chan struct{}, 10), make(chan struct{})
		go func() {
			defer close(ended)
			s.watch(ctx, slog.New(slog.NewTextHandler(&log, nil)), func(context.Context) { changed <- struct{}{} })
		}()
		for what, gone := range map[string]func(){
			"deleted":    remove,
			"emptied":    func() { put("\n") },
			"unreadable": func() { remove(); _ = os.Mkdir(file, 0o700) }, // root reads any file
		} {
			gone()
			time.Sleep(4 * look) // of the bubble
			synctest.Wait()
			if len(changed) > 0 || len(s.Now().ClosedRanges) != 1 {
				t.Errorf("%s: %v is closed", what, s.Now().ClosedRanges)
			}
			if n := log.count("stay as they were"); n != 1 || log.count(file) == 0 {
				t.Errorf("%s: it is said %d times", what, n)
			}
			remove()
			put("closedRanges: [192.0.2.0/24]")
			time.Sleep(2 * look)
			synctest.Wait()
			log.reset()
		}
		put("{}")
		<-changed
		if len(s.Now().ClosedRanges) != 0 {
			t.Errorf("the defaults were asked for: %v", s.Now().ClosedRanges)
		}
		cancel()
		<-ended
	})
}

// TestBuildPolicy: the policy of a build is that of the settings at that moment.
func TestBuildPolicy(t *testing.T) {
	n, change := withSettings(t, Config{Dir: t.TempDir(), Log: silent()}, "buildNetwork: {allow: [index.example.org:443]}")
	wants := func(want ...string) {
		t.Helper()
		if p := n.BuildPolicy(); p.Egress != policy.DenyByDefault || !slices.Equal(policy.Texts(p.Allow), want) {
			t.Errorf("builds may connect to %+v; want %v", p, want)
		}
	}
	wants("index.example.org:443")
	change("buildNetwork: {allow: [mirror.example.org:443]}")
	wants("mirror.example.org:443")
	change("{}")
	wants(defaultBuild...)
}
