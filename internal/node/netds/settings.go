package netds

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/policy"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"
)

// Values are an administrator's settings for the network of a node.
type Values struct {
	// Upstreams are the DNS servers that resolve names.
	Upstreams []netip.AddrPort
	// InternalDomains have DNS servers of their own. Private addresses from
	// those are open for names that a rule allows.
	InternalDomains policy.InternalDomains
	// ClosedRanges are closed in addition to the ranges that are always closed.
	ClosedRanges []netip.Prefix
	// BuildNetwork is the policy for builds whose template does not set one.
	BuildNetwork policy.Policy
	// ECH permits connections that hide their name with Encrypted Client Hello.
	ECH bool
	// Up and Down are the bytes per second that each sandbox may send and receive; 0 is
	// netd's own default.
	Up, Down uint64
	// Roots are the certificates (PEM) of CAs for verifying servers that get values of
	// secrets.
	Roots []byte
	// inFile says that there was a file, and that it was not empty.
	inFile bool
}

// file is the form of Values in a file.
type file struct {
	Upstreams       []string               `json:"upstreams"`
	InternalDomains policy.InternalDomains `json:"internalDomains"`
	ClosedRanges    []string               `json:"closedRanges"`
	BuildNetwork    *policy.Policy         `json:"buildNetwork"`
	ECH             bool                   `json:"ech"`
	InjectRoots     string                 `json:"injectRoots"`
	Bandwidth       bandwidth              `json:"bandwidth"`
}

// bandwidth is bytes per second in each direction.
type bandwidth struct {
	Up   *resource.Quantity `json:"up"`
	Down *resource.Quantity `json:"down"`
}

// With a rate at which its largest frame takes longer than a second, a sandbox has no useful
// network. A rate without a bound is written as the largest.
const minRate, maxRate = 64 << 10, 1 << 40

// read returns both directions; 0 is the default.
func (b bandwidth) read() (up, down uint64, err error) {
	if up, err = rate("up", b.Up); err != nil {
		return 0, 0, err
	}
	down, err = rate("down", b.Down)
	return up, down, err
}

func rate(field string, q *resource.Quantity) (uint64, error) {
	if q == nil {
		return 0, nil
	}
	n, exact := q.AsInt64()
	if !exact || n < minRate || n > maxRate {
		return 0, fmt.Errorf("bandwidth: %s: %s: give bytes per second, from 64Ki to 1Ti, or leave it out for the default", field, q.String())
	}
	return uint64(n), nil
}

// defaultBuild has the public indices of Python, npm and Debian packages.
var defaultBuild = []string{
	"pypi.org:443", "files.pythonhosted.org:443", "registry.npmjs.org:443",
	"deb.debian.org:80", "deb.debian.org:443", "security.debian.org:80", "security.debian.org:443",
}

// Settings are the Values of a node. They follow changes of their files.
type Settings struct {
	path, resolv string
	now          atomic.Pointer[Values]
	roots        rootsFile // only read uses it, one call at a time
	guard        *addresses.Guard
}

// Follow makes a guard close the ranges of the present settings, and of later ones. It
// must be called before the settings are given to New.
func (s *Settings) Follow(g *addresses.Guard) {
	s.guard = g
	g.SetClosed(s.Now().ClosedRanges)
}

// OpenSettings reads the settings in the YAML file path, which need not exist. If the
// file names no DNS servers, it reads them from resolv (resolv.conf(5)). An empty path
// means that there is no file.
func OpenSettings(path, resolv string) (*Settings, error) {
	s := &Settings{path: path, resolv: resolv}
	v, err := s.read()
	if err != nil {
		return nil, err
	}
	s.now.Store(v)
	return s, nil
}

// Now returns the settings that were last read without an error.
func (s *Settings) Now() Values { return *s.now.Load() }

func (s *Settings) read() (*Values, error) {
	var f file
	inFile := false
	if s.path != "" {
		b, err := os.ReadFile(s.path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("read the settings of the network: %w", err)
		}
		if err := yaml.UnmarshalStrict(b, &f); err != nil {
			return nil, fmt.Errorf("the settings of the network in %s: %w", s.path, err)
		}
		inFile = len(bytes.TrimSpace(b)) > 0
	}
	v := &Values{InternalDomains: f.InternalDomains, ECH: f.ECH, inFile: inFile}
	var err error
	if v.ClosedRanges, err = addresses.ParseRanges(f.ClosedRanges); err != nil {
		return nil, fmt.Errorf("the settings of the network in %s: closedRanges: %w", s.path, err)
	}
	if f.BuildNetwork != nil {
		v.BuildNetwork = *f.BuildNetwork
	} else if v.BuildNetwork, err = policy.Parse("deny", defaultBuild, nil); err != nil {
		return nil, err
	}
	for _, text := range f.Upstreams {
		a, err := policy.ParseUpstream(text)
		if err != nil {
			return nil, fmt.Errorf("the settings of the network in %s: upstreams: %w", s.path, err)
		}
		v.Upstreams = append(v.Upstreams, a)
	}
	if len(f.Upstreams) == 0 {
		if v.Upstreams, err = nameservers(s.resolv); err != nil {
			return nil, err
		}
	}
	if v.Up, v.Down, err = f.Bandwidth.read(); err != nil {
		return nil, fmt.Errorf("the settings of the network in %s: %w", s.path, err)
	}
	if v.Roots, err = s.roots.read(f.InjectRoots); err != nil {
		return nil, err
	}
	if err := v.forNetd().Check(); err != nil {
		return nil, fmt.Errorf("the settings of the network in %s: %w", s.path, err)
	}
	return v, nil
}

// reread reads the files for a running daemon. If a file was removed or emptied, it fails:
// using the defaults instead would open the ranges that the file had closed.
func (s *Settings) reread() (*Values, error) {
	v, err := s.read()
	if err == nil && s.Now().inFile && !v.inFile {
		return nil, fmt.Errorf("the settings of the network in %s are gone: write them again, write {} for the defaults, or restart the daemon", s.path)
	}
	return v, err
}

// nameservers returns the DNS servers of a host. A host without DNS servers
// resolves no names.
func nameservers(path string) (out []netip.AddrPort, err error) {
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the host's DNS servers: %w", err)
	}
	const most = 3 // MAXNS of resolv.conf(5)
	for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan() && len(out) < most; {
		words := strings.Fields(lines.Text())
		if len(words) < 2 || words[0] != "nameserver" {
			continue
		}
		// An address with a zone is useless in a process that knows no
		// interfaces.
		if a, err := policy.ParseUpstream(words[1]); err == nil {
			out = append(out, a)
		}
	}
	return out, nil
}

// look is how often the files are checked. They may be links that are replaced, as
// in Kubernetes, which causes no event.
const look = 2 * time.Second

// watch reads the files again when they change, and calls changed.
func (s *Settings) watch(ctx context.Context, log *slog.Logger, changed func(context.Context)) {
	tick := time.NewTicker(look)
	defer tick.Stop()
	problem, last := "", s.Now()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		v, err := s.reread()
		if err != nil {
			if err.Error() != problem {
				problem = err.Error()
				log.Error("the settings of the network stay as they were", "error", err)
			}
			continue
		}
		problem = ""
		// The file may be half written, and that half may be good YAML. So two reads
		// must agree.
		settled := reflect.DeepEqual(*v, last)
		last = *v
		if settled && !reflect.DeepEqual(*v, s.Now()) {
			s.now.Store(v)
			if s.guard != nil {
				s.guard.SetClosed(v.ClosedRanges)
			}
			log.Info("the settings of the network have changed")
			changed(ctx)
		}
	}
}

// forNetd returns the settings that a netd needs.
func (v Values) forNetd() netctl.Settings {
	out := netctl.Settings{Upstreams: v.Upstreams, ClosedRanges: v.ClosedRanges, Roots: v.Roots, Defaults: netctl.Limits{Up: v.Up, Down: v.Down}}
	for _, d := range v.InternalDomains {
		out.InternalDomains = append(out.InternalDomains, netctl.InternalDomain{Domain: string(d.Domain), Upstreams: d.Upstreams})
	}
	return out
}
