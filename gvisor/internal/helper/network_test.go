package helper

import (
	"net/netip"
	"os"
	"slices"
	"testing"

	"agentrun.dev/internal/engine/gvisorctl"
)

// TestLinks: gVisor gets only the requested settings. Segmentation is left to others,
// and no checksum is left out without saying so.
func TestLinks(t *testing.T) {
	n := &gvisorctl.Network{MAC: [6]byte{2, 0, 0, 0, 0, 1}, MTU: 1400, Address: netip.MustParsePrefix("10.0.2.15/24")}
	links := linksOf(n, os.Stdin)
	if len(links.FDBasedLinks) != 1 || len(links.LoopbackLinks) != 1 || len(links.Files) != 1 || links.Files[0] != os.Stdin {
		t.Fatalf("%+v", links)
	}
	l := links.FDBasedLinks[0]
	if l.Name != "eth0" || l.MTU != 1400 || l.LinkAddress.String() != "02:00:00:00:00:01" || l.Addresses[0].String() != "10.0.2.15/24" || l.Routes[0].Destination.String() != "10.0.2.0/24" {
		t.Errorf("%+v", l)
	}
	if l.GSOMaxSize != 65535 || l.TXChecksumOffload || !l.RXChecksumOffload || l.GVisorGRO || l.GVisorGSOEnabled || len(l.Addresses) != 1 {
		t.Errorf("%+v", l)
	}
	if !links.Defaultv4Gateway.Route.Empty() || !links.Defaultv6Gateway.Route.Empty() {
		t.Errorf("a gateway out of nowhere: %+v", links.Defaultv4Gateway)
	}
	n.Gateway = netip.MustParseAddr("10.0.2.2")
	if r := linksOf(n, os.Stdin).Defaultv4Gateway; r.Name != "eth0" || r.Route.Destination.String() != "0.0.0.0/0" || r.Route.Gateway.String() != "10.0.2.2" {
		t.Errorf("%+v", r)
	}
	n.Address6, n.Gateway6 = netip.MustParsePrefix("fd00:a9e7::2/126"), netip.MustParseAddr("fd00:a9e7::1")
	links = linksOf(n, os.Stdin)
	l = links.FDBasedLinks[0]
	if r := links.Defaultv6Gateway; r.Name != "eth0" || r.Route.Destination.String() != "::/0" || r.Route.Gateway.String() != "fd00:a9e7::1" {
		t.Errorf("%+v", r)
	}
	if len(l.Addresses) != 2 || l.Addresses[1].String() != "fd00:a9e7::2/126" || len(l.Routes) != 2 || l.Routes[1].Destination.String() != "fd00:a9e7::/126" {
		t.Errorf("%+v", l)
	}
}

func TestTellApart(t *testing.T) {
	a, b, c, d := os.Stdin, os.Stdout, os.Stderr, os.NewFile(0, "another")
	n := &gvisorctl.Network{}
	for _, tt := range []struct {
		m     gvisorctl.Message
		files []*os.File
		first int
		want  runFiles
	}{
		{gvisorctl.Message{}, nil, 0, runFiles{}},
		{gvisorctl.Message{Network: n}, []*os.File{a, b}, 0, runFiles{wire: a, host: b}},
		{gvisorctl.Message{Listen: true}, []*os.File{a, b}, 1, runFiles{first: []*os.File{a}, listener: b}},
		{gvisorctl.Message{Network: n, Listen: true}, []*os.File{a, b, c, d}, 1, runFiles{[]*os.File{a}, b, c, d}},
	} {
		got, err := tellApart(&tt.m, tt.files, tt.first)
		if err != nil || !slices.Equal(got.first, tt.want.first) || got.wire != tt.want.wire || got.host != tt.want.host || got.listener != tt.want.listener {
			t.Errorf("%+v with %d files: %+v, %v", tt.m, len(tt.files), got, err)
		}
		if _, err := tellApart(&tt.m, append(slices.Clone(tt.files), a), tt.first); err == nil {
			t.Errorf("%+v: a file too many", tt.m)
		}
		tt.m.Network, tt.m.Listen = n, true
		if _, err := tellApart(&tt.m, nil, tt.first); err == nil {
			t.Errorf("%+v: no files", tt.m)
		}
	}
}

// TestAgentArgs: the arguments are part of a checkpoint, so they must stay the same.
func TestAgentArgs(t *testing.T) {
	c := &gvisorctl.Create{DNS: []netip.Addr{netip.MustParseAddr("9.9.9.9"), netip.MustParseAddr("10.0.2.3"), netip.MustParseAddr("fd00::1")}}
	if got := agentArgs(c); !slices.Equal(got, []string{"init", "--enter-container", "--dns=9.9.9.9", "--dns=10.0.2.3", "--dns=fd00:0000:0000:0000:0000:0000:0000:0001"}) {
		t.Errorf("%q", got)
	}
}
