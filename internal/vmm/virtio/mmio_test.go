package virtio

import (
	"bytes"
	"errors"
	"math"
	"testing"
)

// probe is a device that records its calls.
type probe struct {
	core
	config   [16]byte
	notified []int
	active   bool
	resets   int
	pauses   int
	resumes  int
	refuse   error
}

func (p *probe) Type() uint32                    { return 42 }
func (p *probe) Features() uint64                { return 1<<0 | 1<<40 }
func (p *probe) QueueSizes() []uint16            { return []uint16{8, 16} }
func (p *probe) ReadConfig(off uint64, b []byte) { configRead(p.config[:], off, b) }
func (p *probe) WriteConfig(off uint64, b []byte) {
	if off < uint64(len(p.config)) {
		copy(p.config[off:], b)
	}
}
func (p *probe) Activate(ctx DriverContext) error {
	if p.refuse != nil {
		return p.refuse
	}
	p.active = true
	p.activate(ctx)
	return nil
}
func (p *probe) Notify(q int) { p.notified = append(p.notified, q) }
func (p *probe) Reset()       { p.resets++; p.active = false; p.deactivate() }
func (p *probe) Pause()       { p.pauses++; p.core.Pause() }
func (p *probe) Resume()      { p.resumes++; p.unpause() }

func TestMMIOConstantRegisters(t *testing.T) {
	g := newGuest(t, &probe{})
	for reg, want := range map[uint64]uint32{
		regMagic: 0x74726976, regVersion: 2, regDeviceID: 42, regVendorID: mmioVendor,
		regSHMLenLow: math.MaxUint32, regSHMLenHigh: math.MaxUint32,
		regSHMBaseLow: math.MaxUint32, regSHMBaseHigh: math.MaxUint32,
		regQueueNumMax: 8, regQueueReady: 0, regInterruptStatus: 0, regStatus: 0,
		regConfigGeneration: 0, regQueueReset: 0,
		// write-only or reserved
		regDeviceFeaturesSel: 0, regDriverFeatures: 0, regQueueSel: 0, regQueueNum: 0,
		regQueueNotify: 0, regInterruptACK: 0, regQueueDescLow: 0, regSHMSel: 0, 0x0f8: 0,
	} {
		if got := g.readReg(reg); got != want {
			t.Errorf("register %#x reads %#x, want %#x", reg, got, want)
		}
	}
	for sel, want := range map[uint32]uint32{0: 1 | 1<<28, 1: 1<<8 | 1<<0, 2: 0, math.MaxUint32: 0} {
		g.writeReg(regDeviceFeaturesSel, sel)
		if got := g.readReg(regDeviceFeatures); got != want {
			t.Errorf("features[%d] = %#x, want %#x", sel, got, want)
		}
	}
	for sel, want := range map[uint32]uint32{0: 8, 1: 16, 2: 0, math.MaxUint32: 0} {
		g.writeReg(regQueueSel, sel)
		if got := g.readReg(regQueueNumMax); got != want {
			t.Errorf("QueueNumMax[%d] = %d, want %d", sel, got, want)
		}
	}
}

func TestMMIOAccessWidth(t *testing.T) {
	p := &probe{}
	copy(p.config[:], "0123456789abcdef")
	g := newGuest(t, p)
	for _, n := range []int{0, 1, 2, 3, 8, 16} { // registers are 32 bits wide
		data := bytes.Repeat([]byte{0xff}, n)
		g.bus.Read(regMagic, data)
		if !bytes.Equal(data, make([]byte, n)) {
			t.Errorf("%d-byte read gave %x", n, data)
		}
		g.bus.Write(regStatus, bytes.Repeat([]byte{1}, n))
	}
	g.bus.Write(regStatus+1, []byte{1, 0, 0, 0})
	if s := g.readReg(regStatus); s != 0 {
		t.Errorf("odd writes changed the status to %#x", s)
	}
	for off, want := range map[uint64]string{0: "0", 1: "1", 2: "23", 4: "4567", 8: "89abcdef", 16: "\x00\x00", 15: "f"} {
		data := make([]byte, len(want))
		g.bus.Read(regConfig+off, data)
		if string(data) != want {
			t.Errorf("config %d: %q, want %q", off, data, want)
		}
	}
	data := []byte{1, 1, 1, 1}
	g.bus.Read(regConfig+2, data) // misaligned
	g.bus.Write(regConfig+2, data)
	g.bus.Write(regConfig, make([]byte, 3))
	g.bus.Write(MMIOSize, []byte{9})
	g.bus.Write(math.MaxUint64, []byte{9})
	if !bytes.Equal(data, make([]byte, 4)) || string(p.config[:]) != "0123456789abcdef" {
		t.Errorf("misaligned access: %x, %q", data, p.config)
	}
	g.bus.Write(regConfig+4, []byte("WXYZ"))
	if string(p.config[4:8]) != "WXYZ" {
		t.Errorf("config %q", p.config)
	}
}

func TestMMIOStatusMachine(t *testing.T) {
	const (
		a    = statusAcknowledge
		ad   = a | statusDriver
		adf  = ad | statusFeaturesOK
		full = adf | statusDriverOK
	)
	tests := []struct {
		name     string
		features uint64
		writes   []uint32
		want     uint32
	}{
		{"ladder", FeatureVersion1, []uint32{a, ad, adf, full}, full},
		{"all at once", FeatureVersion1, []uint32{full}, full},
		{"driver without acknowledge", FeatureVersion1, []uint32{statusDriver}, 0},
		{"features without driver", FeatureVersion1, []uint32{a, a | statusFeaturesOK}, a},
		{"driver ok without features", FeatureVersion1, []uint32{a, ad, ad | statusDriverOK}, ad},
		{"without version 1", 1, []uint32{a, ad, adf}, ad},
		{"not offered", FeatureVersion1 | 1<<5, []uint32{a, ad, adf, full}, ad},
		{"clearing a bit", FeatureVersion1, []uint32{a, ad, a}, ad},
		{"needs reset is not the driver's", FeatureVersion1, []uint32{a | statusNeedsReset}, a},
		{"unknown bits", FeatureVersion1, []uint32{a | 1<<20 | 16}, a},
		{"failed", FeatureVersion1, []uint32{a, ad, ad | statusFailed}, ad | statusFailed},
		{"reset", FeatureVersion1, []uint32{a, ad, adf, full, 0}, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := &probe{}
			g := newGuest(t, p)
			g.writeReg(regDriverFeatures, uint32(tt.features))
			g.writeReg(regDriverFeaturesSel, 1)
			g.writeReg(regDriverFeatures, uint32(tt.features>>32))
			for _, w := range tt.writes {
				g.writeReg(regStatus, w)
			}
			if got := g.readReg(regStatus); got != tt.want {
				t.Fatalf("status %#x, want %#x", got, tt.want)
			}
			if p.active != (tt.want&statusDriverOK != 0) {
				t.Fatalf("active %v", p.active)
			}
		})
	}
}

func TestMMIOForbiddenWrites(t *testing.T) {
	p := &probe{}
	g := newGuest(t, p)
	g.writeReg(regQueueNum, 4) // before FEATURES_OK
	g.writeReg(regQueueReady, 1)
	if g.readReg(regQueueReady) != 0 {
		t.Fatal("queue enabled before features were agreed on")
	}
	g.kick(0)
	g.negotiate(FeatureVersion1)
	g.writeReg(regDriverFeaturesSel, 0)
	g.writeReg(regDriverFeatures, 1) // after FEATURES_OK
	g.writeReg(regDriverFeaturesSel, 2)
	g.writeReg(regDriverFeatures, 1)
	if g.bus.driverFeatures != FeatureVersion1 {
		t.Fatalf("features changed to %#x", g.bus.driverFeatures)
	}
	r := g.newRing(8)
	g.setQueue(0, r)
	g.writeReg(regQueueNum, 2) // while ready
	g.writeReg(regQueueDescLow, 0)
	if q := g.bus.queues[0]; q.size != 8 || q.desc != r.desc {
		t.Fatalf("a ready queue changed: %+v", q)
	}
	g.writeReg(regQueueReady, 2) // neither 0 nor 1
	g.driverOK()
	g.writeReg(regQueueSel, 1)
	g.writeReg(regQueueNum, 8)
	g.writeReg(regQueueReady, 1) // after DRIVER_OK
	if g.readReg(regQueueReady) != 0 {
		t.Fatal("queue enabled after DRIVER_OK")
	}
	g.writeReg(regQueueSel, 7)
	g.writeReg(regQueueReady, 1)
	g.writeReg(regQueueReady, 0)
	g.writeReg(regQueueNum, 8)
	for _, q := range []uint32{0, 1, 2, 7, math.MaxUint32} {
		g.writeReg(regQueueNotify, q)
	}
	if len(p.notified) != 2 {
		t.Fatalf("notified %v", p.notified)
	}
	// A driver may stop a queue, for good.
	g.writeReg(regQueueSel, 0)
	g.writeReg(regQueueReady, 0)
	if g.readReg(regQueueReady) != 0 || p.pauses != 1 || p.resumes != 1 {
		t.Fatalf("stopping a queue: %d pauses, %d resumes", p.pauses, p.resumes)
	}
	g.writeReg(regQueueReady, 1)
	if g.readReg(regQueueReady) != 0 {
		t.Fatal("queue came back")
	}
}

func TestMMIOBadQueueNeedsReset(t *testing.T) {
	for name, r := range map[string]*ring{
		"size":       {size: 3, desc: 0x1000, avail: 0x2000, used: 0x3000},
		"too large":  {size: 32, desc: 0x1000, avail: 0x2000, used: 0x3000},
		"alignment":  {size: 8, desc: 0x1001, avail: 0x2000, used: 0x3000},
		"out of RAM": {size: 8, desc: 0x1000, avail: 0x2000, used: 1 << 40},
	} {
		t.Run(name, func(t *testing.T) {
			p := &probe{}
			g := newGuest(t, p)
			g.negotiate(FeatureVersion1)
			g.setQueue(0, r)
			if g.readReg(regQueueReady) != 0 || g.readReg(regStatus)&statusNeedsReset == 0 || g.bus.Failure() == nil {
				t.Fatal("bad queue was accepted")
			}
			if g.raised.Load() != 0 {
				t.Fatal("interrupt before DRIVER_OK") // §2.1.2
			}
			g.driverOK()
			if p.active {
				t.Fatal("device runs")
			}
			g.negotiate(FeatureVersion1)
			if g.bus.Failure() != nil {
				t.Fatal("failure survived the reset")
			}
		})
	}
}

func TestMMIOInterruptsAndConfigGeneration(t *testing.T) {
	p := &probe{}
	g := newGuest(t, p)
	g.start(FeatureVersion1, 8)
	p.ctx.Interrupt()
	p.ctx.Interrupt() // every announcement is an edge
	if g.raised.Load() != 2 || g.readReg(regInterruptStatus) != interruptUsed {
		t.Fatalf("raised %d, status %#x", g.raised.Load(), g.readReg(regInterruptStatus))
	}
	p.ctx.ConfigChanged()
	if g.readReg(regConfigGeneration) != 1 || g.readReg(regInterruptStatus) != interruptUsed|interruptConfig {
		t.Fatalf("generation %d, status %#x", g.readReg(regConfigGeneration), g.readReg(regInterruptStatus))
	}
	g.writeReg(regInterruptACK, interruptUsed)
	if got := g.readReg(regInterruptStatus); got != interruptConfig {
		t.Fatalf("after acknowledging: %#x", got)
	}
	g.writeReg(regInterruptACK, math.MaxUint32)
	boom := errors.New("boom")
	p.ctx.Fail(boom)
	g.wantBroken()
	if !errors.Is(g.bus.Failure(), boom) {
		t.Fatal(g.bus.Failure())
	}
	g.writeReg(regStatus, 0)
	if p.resets != 2 || g.readReg(regInterruptStatus) != 0 || g.readReg(regStatus) != 0 || g.readReg(regQueueReady) != 0 {
		t.Fatalf("after reset: %d resets, interrupts %#x", p.resets, g.readReg(regInterruptStatus))
	}
}

func TestMMIOActivateError(t *testing.T) {
	g := newGuest(t, &probe{refuse: errors.New("no")})
	g.start(FeatureVersion1, 8)
	g.wantBroken()
}

func TestMMIOSaveRestore(t *testing.T) {
	p := &probe{}
	g := newGuest(t, p)
	g.start(FeatureVersion1|FeatureIndirectDesc|1<<40, 8)
	if _, err := g.bus.Save(); !errors.Is(err, errNotPaused) {
		t.Fatalf("Save while running: %v", err)
	}
	p.ctx.ConfigChanged()
	g.bus.queues[0].nextAvail, g.bus.queues[1].nextUsed = 65535, 7
	before := g.raised.Load()
	s := g.save()
	p.ctx.Interrupt() // no edge while paused
	if g.raised.Load() != before {
		t.Fatal("edge while paused")
	}
	s.InterruptStatus = interruptConfig
	p2 := &probe{}
	g.restore(p2, s)
	if !p2.active || !p2.paused {
		t.Fatalf("restored device: active %v, paused %v", p2.active, p2.paused)
	}
	if got, err := g.bus.Save(); err != nil || got != s {
		t.Fatalf("state %+v, want %+v (%v)", got, s, err)
	}
	before = g.raised.Load()
	g.bus.Resume()
	if g.raised.Load() != before+1 || g.readReg(regInterruptStatus) != interruptConfig {
		t.Fatalf("Resume: %d edges, status %#x", g.raised.Load()-before, g.readReg(regInterruptStatus))
	}
	g.writeReg(regInterruptACK, interruptConfig)
	g.bus.Pause()
	g.bus.Resume()
	if g.raised.Load() != before+1 {
		t.Fatal("an edge that the driver has seen was raised again")
	}
	if !g.bus.queues[0].indirect || p2.ctx.Features != s.DriverFeatures {
		t.Fatal("features were lost")
	}

	for name, change := range map[string]func(*MMIOState){
		"type":       func(s *MMIOState) { s.DeviceType = 1 },
		"queues":     func(s *MMIOState) { s.NumQueues = 3 },
		"features":   func(s *MMIOState) { s.DriverFeatures |= 1 << 3 },
		"version":    func(s *MMIOState) { s.DriverFeatures = 0 },
		"status":     func(s *MMIOState) { s.Status = statusDriverOK },
		"bits":       func(s *MMIOState) { s.Status |= 1 << 9 },
		"interrupts": func(s *MMIOState) { s.InterruptStatus = 4 },
		"ring":       func(s *MMIOState) { s.Queues[1].Used = 1 << 50 },
		"ring size":  func(s *MMIOState) { s.Queues[0].Size = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			bad := s
			change(&bad)
			bus := NewMMIO(g.mem, &probe{}, func() {})
			if err := bus.Restore(bad); err == nil {
				t.Fatal("accepted")
			}
		})
	}
}

// TestMMIORestoreIdle restores a device that no driver has touched, and a
// broken one.
func TestMMIORestoreIdle(t *testing.T) {
	g := newGuest(t, &probe{})
	s := g.save()
	p := &probe{}
	g.restore(p, s)
	g.bus.Resume()
	if p.active || g.raised.Load() != 0 {
		t.Fatal("idle device came to life")
	}
	g.start(FeatureVersion1, 8)
	g.bus.fail(errors.New("x"))
	s = g.save()
	p = &probe{}
	g.restore(p, s)
	if p.active {
		t.Fatal("broken device came to life")
	}
	g.bus.Resume()
	if g.readReg(regStatus)&statusNeedsReset == 0 {
		t.Fatal("NEEDS_RESET was lost")
	}
}
