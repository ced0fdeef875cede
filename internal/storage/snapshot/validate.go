package snapshot

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"agentrun.dev/internal/storage/layer"
)

// Bounds of the values in a manifest. A vmm has its own, narrower ones.
const (
	maxVCPUs   = 256
	maxDevices = 24
	maxTSCKHz  = 100_000_000
	maxLabels  = 64
	maxLabel   = 256
	maxSession = 8 << 10
	maxDiskID  = 20 // virtio 1.2 §5.2.6: VIRTIO_BLK_ID_BYTES
	minMTU     = 68 // virtio 1.2 §5.1.4.1
	maxMTU     = 65535
	maxDNS     = 3 // MAXNS of resolv.conf(5)
	// maxFeatures is far more words than a processor has. maxCPUFeatures is far
	// more names: today's processors have about 200.
	maxFeatures    = 64
	maxCPUFeatures = 1024
)

// checkOrigin refuses a snapshot of another program, and says what to do.
func checkOrigin(format int, engine string) error {
	if format != Format && format != FormatPrivate {
		return fmt.Errorf("format: %d, this agentrun reads %d and %d: use the version that made the snapshot, or make a new one", format, Format, FormatPrivate)
	}
	if engine != Engine && engine != EngineGVisor {
		return fmt.Errorf("engine: %.80q, this agentrun restores %q and %q: use the version that made the snapshot, or make a new one", engine, Engine, EngineGVisor)
	}
	return nil
}

// Validate checks every value. Its errors begin with the field's name.
func (m Manifest) Validate() error {
	if err := checkOrigin(m.Format, m.Engine); err != nil {
		return err
	}
	if m.Private != (m.Format == FormatPrivate) {
		return fmt.Errorf("private: a snapshot is private if and only if it has format %d", FormatPrivate)
	}
	if m.Created.Location() != time.UTC || m.Created.Nanosecond() != 0 || m.Created.Year() < 1970 || m.Created.Year() > 9999 {
		return fmt.Errorf("created: %s is not UTC in whole seconds, from 1970 to 9999", m.Created)
	}
	if m.Parent != "" {
		if _, err := ParseID(m.Parent); err != nil {
			return fmt.Errorf("parent: %w", err)
		}
	}
	if err := m.validateEngine(); err != nil {
		return err
	}
	if err := m.CPU.validate(); err != nil {
		return fmt.Errorf("cpu: %w", err)
	}
	switch {
	case m.VCPUs < 1 || m.VCPUs > maxVCPUs:
		return fmt.Errorf("vcpus: %d is not between 1 and %d", m.VCPUs, maxVCPUs)
	case m.State.Size == 0 || m.State.Size > MaxState:
		return fmt.Errorf("state: %d bytes are not between 1 and %d", m.State.Size, MaxState)
	case len(m.Session) > maxSession:
		return fmt.Errorf("session: %d bytes are more than %d", len(m.Session), maxSession)
	case !validHostname(m.Hostname):
		return fmt.Errorf("hostname: %.80q has other characters than letters, digits and hyphens, or more than 63", m.Hostname)
	}
	if err := validateLabels(m.Labels); err != nil {
		return fmt.Errorf("labels: %w", err)
	}
	if err := m.validateDevices(); err != nil {
		return err
	}
	return m.validateStacks()
}

// validateEngine checks the fields that only one engine's snapshots have.
func (m Manifest) validateEngine() error {
	if m.Engine == EngineGVisor {
		switch {
		case m.Kernel != "" || m.TSCKHz != 0 || len(m.Memory.Layers) != 0:
			return errors.New("kernel, tsc_khz, memory: these are of microVMs")
		case m.GVisor == nil:
			return errors.New("gvisor: missing")
		}
		if err := m.GVisor.validate(); err != nil {
			return fmt.Errorf("gvisor: %w", err)
		}
		return nil
	}
	if m.GVisor != nil {
		return errors.New("gvisor: this is no snapshot of that engine")
	}
	if _, err := layer.ParseDigest(m.Kernel); err != nil {
		return fmt.Errorf("kernel: %w", err)
	}
	if m.TSCKHz == 0 || m.TSCKHz > maxTSCKHz {
		return fmt.Errorf("tsc_khz: %d is not between 1 and %d", m.TSCKHz, maxTSCKHz)
	}
	return nil
}

func (g *GVisor) validate() error {
	if _, err := layer.ParseDigest(g.Helper); err != nil {
		return fmt.Errorf("helper: %w", err)
	}
	if !printable(g.Platform, 64) {
		return fmt.Errorf("platform: %.80q is not a name of 1 to 64 characters", g.Platform)
	}
	if len(g.CPUFeatures) > maxCPUFeatures {
		return fmt.Errorf("cpu_features: %d are more than %d", len(g.CPUFeatures), maxCPUFeatures)
	}
	for _, f := range g.CPUFeatures {
		if !printable(f, 64) {
			return fmt.Errorf("cpu_features: %.80q is not a name of 1 to 64 characters", f)
		}
	}
	if g.Pages.Size == 0 || g.Pages.Size%layer.PageSize != 0 {
		return fmt.Errorf("pages: %d bytes are not whole pages", g.Pages.Size)
	}
	return nil
}

func (c CPU) validate() error {
	switch {
	case !printable(c.Profile, 64):
		return fmt.Errorf("profile: %.80q is not a name of 1 to 64 characters", c.Profile)
	case !printable(c.Vendor, 64):
		return fmt.Errorf("vendor: %.80q is not a name of 1 to 64 characters", c.Vendor)
	// CPUID leaf 1: extended family and family add up to at most 270, a model
	// has eight bits, a stepping four.
	case c.Family < 0 || c.Family > 0x10e || c.Model < 0 || c.Model > 0xff || c.Stepping < 0 || c.Stepping > 0xf:
		return fmt.Errorf("family %d, model %d, stepping %d: no processor has these", c.Family, c.Model, c.Stepping)
	case len(c.Features) > maxFeatures:
		return fmt.Errorf("features: %d words are more than %d", len(c.Features), maxFeatures)
	}
	for name := range c.Features {
		if !printable(name, 32) {
			return fmt.Errorf("features: %.80q is not a name of 1 to 32 characters", name)
		}
	}
	return nil
}

// printable accepts 1 to most visible ASCII characters.
func printable(s string, most int) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return s != "" && len(s) <= most
}

// text accepts at most that many bytes of text without control characters.
func text(s string, most int) bool {
	return len(s) <= most && utf8.ValidString(s) && strings.IndexFunc(s, unicode.IsControl) < 0
}

func letterOrDigit(c rune) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

// validHostname accepts the host names that the agent accepts, and the empty
// name.
func validHostname(s string) bool {
	return len(s) <= 63 && strings.IndexFunc(s, func(c rune) bool { return !letterOrDigit(c) && c != '-' }) < 0
}

func validateLabels(labels map[string]string) error {
	if len(labels) > maxLabels {
		return fmt.Errorf("%d are more than %d", len(labels), maxLabels)
	}
	for k, v := range labels {
		if k == "" || len(k) > maxLabel || strings.IndexFunc(k, func(c rune) bool { return !letterOrDigit(c) && !strings.ContainsRune("-_./", c) }) >= 0 {
			return fmt.Errorf("the key %.80q has other characters than letters, digits and -_./, or not 1 to %d", k, maxLabel)
		}
		if !text(v, maxLabel) {
			return fmt.Errorf("the value of %q has control characters, or more than %d bytes", k, maxLabel)
		}
	}
	return nil
}

func (m Manifest) validateDevices() error {
	if len(m.Disks) > maxDevices || len(m.Nets) > maxDevices {
		return fmt.Errorf("disks, nets: %d and %d; at most %d are possible", len(m.Disks), len(m.Nets), maxDevices)
	}
	for i, d := range m.Disks {
		if !text(d.ID, maxDiskID) {
			return fmt.Errorf("disks[%d].id: %.80q has control characters, or more than %d bytes", i, d.ID, maxDiskID)
		}
	}
	for i, n := range m.Nets {
		if err := n.validate(); err != nil {
			return fmt.Errorf("nets[%d].%w", i, err)
		}
	}
	return nil
}

func (n Net) validate() error {
	mac, err := net.ParseMAC(n.MAC)
	if err != nil || len(mac) != 6 || mac.String() != n.MAC || mac[0]&1 != 0 {
		return fmt.Errorf("mac: %.80q is not the address of one device, as in 02:00:00:00:00:01", n.MAC)
	}
	if n.MTU < minMTU || n.MTU > maxMTU {
		return fmt.Errorf("mtu: %d is not between %d and %d", n.MTU, minMTU, maxMTU)
	}
	if p, err := netip.ParsePrefix(n.Address); err != nil || p.String() != n.Address || p.Bits() < 1 || !p.Addr().Is4() {
		return fmt.Errorf("address: %.80q is not one of IPv4 with a prefix, as in 10.0.2.15/24", n.Address)
	}
	if n.Gateway != "" && !ipv4(n.Gateway) {
		return fmt.Errorf("gateway: %.80q is not an address of IPv4", n.Gateway)
	}
	if n.Address6 != "" {
		if p, err := netip.ParsePrefix(n.Address6); err != nil || p.String() != n.Address6 || p.Bits() < 1 || !ipv6(p.Addr().String()) {
			return fmt.Errorf("address6: %.80q is not one of IPv6 with a prefix, as in fd00::2/126", n.Address6)
		}
	}
	if n.Gateway6 != "" && (n.Address6 == "" || !ipv6(n.Gateway6)) {
		return fmt.Errorf("gateway6: %.80q is not an address of IPv6, or of an interface without any", n.Gateway6)
	}
	if len(n.DNS) > maxDNS {
		return fmt.Errorf("dns: %d servers are more than %d", len(n.DNS), maxDNS)
	}
	for _, s := range n.DNS {
		if !ipv4(s) && !ipv6(s) {
			return fmt.Errorf("dns: %.80q is not an address of IPv4 or IPv6", s)
		}
	}
	return nil
}

// ipv4 accepts an IPv4 address in its canonical form.
func ipv4(s string) bool {
	a, err := netip.ParseAddr(s)
	return err == nil && a.Is4() && a.String() == s
}

// ipv6 accepts an IPv6 address in its canonical form, without a zone. It
// refuses mapped IPv4 addresses.
func ipv6(s string) bool {
	a, err := netip.ParseAddr(s)
	return err == nil && a.Is6() && !a.Is4In6() && a.Zone() == "" && a.String() == s
}

func (m Manifest) validateStacks() error {
	sizes := map[layer.Digest]uint64{}
	for i, stack := range m.stacks() {
		name := "memory"
		if i > 0 {
			name = fmt.Sprintf("disks[%d].image", i-1)
		}
		if err := stack.Layer().Validate(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		for _, l := range stack.Layers {
			if size, ok := sizes[l.Digest]; ok && size != l.Size {
				return fmt.Errorf("%s: layer %s has %d bytes here and %d elsewhere", name, l.Digest, l.Size, size)
			}
			sizes[l.Digest] = l.Size
		}
	}
	return nil
}
