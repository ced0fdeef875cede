package vmmctl

import (
	"errors"
	"fmt"
	"time"

	"agentrun.dev/internal/codec"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/livefork"
)

func (m *Boot) encode(e *codec.Encoder) {
	e.String(m.Cmdline)
	e.Uvarint(m.Memory)
	e.Uvarint(m.VCPUs)
	e.String(m.Profile)
	e.Bool(m.HasUserfaultfd)
	e.Bool(m.HasInitrd)
	m.Devices.encode(e)
}

func (m *Boot) decode(d *codec.Decoder) {
	m.Cmdline = d.String(maxText)
	m.Memory = d.Uvarint()
	m.VCPUs = d.UvarintMax(1 << 16)
	m.Profile = d.String(maxText)
	m.HasUserfaultfd = d.Bool()
	m.HasInitrd = d.Bool()
	m.Devices.decode(d)
}

func (m *Spare) encode(e *codec.Encoder) {
	encodeStack(e, &m.Memory)
	e.String(m.Profile)
	e.Uvarint(m.VCPUs)
	m.Touch.encode(e)
	e.Bool(m.Watch)
	e.Bool(m.HasUserfaultfd)
}

func (m *Spare) decode(d *codec.Decoder) {
	m.Memory = decodeStack(d)
	m.Profile = d.String(maxText)
	m.VCPUs = d.UvarintMax(1 << 16)
	m.Touch.decode(d)
	m.Watch = d.Bool()
	m.HasUserfaultfd = d.Bool()
}

func (m *Load) encode(e *codec.Encoder) {
	e.Uvarint(m.ID)
	m.Devices.encode(e)
}

func (m *Load) decode(d *codec.Decoder) {
	m.ID = d.Uvarint()
	m.Devices.decode(d)
}

func (d *Devices) encode(e *codec.Encoder) {
	e.Bool(d.Listen)
	e.Bool(d.Standby)
	e.Uvarint(uint64(d.ReadyPort))
	e.Uvarint(uint64(len(d.Disks)))
	for i := range d.Disks {
		k := &d.Disks[i]
		e.Bool(k.ReadOnly)
		e.String(k.ID)
		e.Bool(k.Stack != nil)
		if k.Stack != nil {
			encodeStack(e, k.Stack)
		}
		e.Uvarint(k.BytesPerSecond)
		e.Uvarint(k.OpsPerSecond)
	}
	e.Uvarint(uint64(len(d.Nets)))
	for _, n := range d.Nets {
		e.Data(n.MAC[:])
		e.Uvarint(uint64(n.MTU))
	}
	e.Uvarint(d.MaxFile)
}

func (d *Devices) decode(w *codec.Decoder) {
	d.Listen = w.Bool()
	d.Standby = w.Bool()
	d.ReadyPort = uint32(w.UvarintMax(1<<32 - 1))
	for range w.Count(maxDevices) {
		k := Disk{ReadOnly: w.Bool(), ID: w.String(maxText)}
		if w.Bool() {
			stack := decodeStack(w)
			k.Stack = &stack
		}
		k.BytesPerSecond, k.OpsPerSecond = w.Uvarint(), w.Uvarint()
		d.Disks = append(d.Disks, k)
	}
	for range w.Count(maxDevices) {
		var n Net
		if copy(n.MAC[:], w.View(len(n.MAC))) != len(n.MAC) {
			w.Fail(errors.New("a MAC address has six bytes"))
		}
		n.MTU = uint16(w.UvarintMax(1<<16 - 1))
		d.Nets = append(d.Nets, n)
	}
	d.MaxFile = w.Uvarint()
}

func encodeStack(e *codec.Encoder, stack *layer.Stack) {
	e.Uvarint(stack.Size)
	e.Uvarint(uint64(len(stack.Layers)))
	for _, r := range stack.Layers {
		e.Data(r.Digest[:])
		e.Uvarint(r.Size)
	}
	e.Uvarint(uint64(len(stack.Extents)))
	for _, x := range stack.Extents {
		e.Uvarint(x.Start)
		e.Uvarint(x.Length)
		e.Uvarint(uint64(x.Layer))
		e.Uvarint(x.Offset)
	}
}

func decodeStack(d *codec.Decoder) (stack layer.Stack) {
	stack.Size = d.Uvarint()
	for range d.Count(layer.MaxLayers) {
		var r layer.Ref
		if copy(r.Digest[:], d.View(len(r.Digest))) != len(r.Digest) {
			d.Fail(fmt.Errorf("a digest has %d bytes", len(r.Digest)))
		}
		r.Size = d.Uvarint()
		stack.Layers = append(stack.Layers, r)
	}
	for range d.Count(layer.MaxExtents) {
		stack.Extents = append(stack.Extents, layer.Extent{
			Start: d.Uvarint(), Length: d.Uvarint(), Layer: int(d.UvarintMax(layer.MaxLayers)), Offset: d.Uvarint(),
		})
	}
	if d.Err() == nil {
		if err := stack.Validate(); err != nil {
			d.Fail(err)
		}
	}
	return stack
}

func (m *Save) encode(e *codec.Encoder) {
	e.Uvarint(m.ID)
	e.Bool(m.Rebase)
	encodeRuns(e, m.Memory)
	e.Uvarint(uint64(len(m.Disks)))
	for _, runs := range m.Disks {
		encodeRuns(e, runs)
	}
}

func (m *Save) decode(d *codec.Decoder) {
	m.ID = d.Uvarint()
	m.Rebase = d.Bool()
	m.Memory = decodeRuns(d, layer.MaxExtents)
	for range d.Count(maxDevices) {
		m.Disks = append(m.Disks, decodeRuns(d, layer.MaxExtents))
	}
}

func encodeRuns(e *codec.Encoder, runs []extent.Run) {
	e.Uvarint(uint64(len(runs)))
	for _, r := range runs {
		e.Uvarint(r.Start)
		e.Uvarint(r.Length)
	}
}

// Marshal encodes s for a Reply's data.
func (s *Saved) Marshal() []byte {
	e := codec.NewEncoder(nil)
	e.Version(messageVersion)
	s.Memory.encode(e)
	e.Uvarint(uint64(len(s.Disks)))
	for i := range s.Disks {
		s.Disks[i].encode(e)
	}
	e.Uvarint(uint64(s.Pause))
	e.Uvarint(s.Waits)
	for _, d := range []time.Duration{s.MedianWait, s.P99Wait, s.LongestWait} {
		e.Uvarint(uint64(d))
	}
	e.Uvarint(s.Copied)
	e.String(s.WhyCopiedInPause)
	return e.Bytes()
}

// UnmarshalSaved decodes a Reply's data.
func UnmarshalSaved(b []byte) (*Saved, error) {
	s := &Saved{}
	d := codec.NewDecoder(b)
	d.Version(messageVersion)
	s.Memory.decode(d)
	for range d.Count(maxDevices) {
		var c Change
		c.decode(d)
		s.Disks = append(s.Disks, c)
	}
	s.Stats = livefork.Stats{
		Pause: time.Duration(d.Uvarint()), Waits: d.Uvarint(), MedianWait: time.Duration(d.Uvarint()),
		P99Wait: time.Duration(d.Uvarint()), LongestWait: time.Duration(d.Uvarint()), Copied: d.Uvarint(),
		WhyCopiedInPause: d.String(maxText),
	}
	if err := d.Finish(); err != nil {
		return nil, fmt.Errorf("decode what was saved: %w", err)
	}
	return s, nil
}

func (c *Change) encode(e *codec.Encoder) {
	encodeRuns(e, c.Runs)
	encodeRuns(e, c.Zeros)
}

func (c *Change) decode(d *codec.Decoder) {
	c.Runs, c.Zeros = decodeRuns(d, layer.MaxExtents), decodeRuns(d, layer.MaxExtents)
}

// Touched lists pages of memory that a guest has used: those that it has
// written, which are its own since then, and those that it has only read. Each
// list is sorted.
type Touched struct{ Written, Read []extent.Run }

func (t *Touched) encode(e *codec.Encoder) {
	encodeRuns(e, t.Written)
	encodeRuns(e, t.Read)
}

func (t *Touched) decode(d *codec.Decoder) {
	t.Written, t.Read = decodeRuns(d, MaxTouched), decodeRuns(d, MaxTouched)
}

// Marshal encodes the pages for a Reply's data. Of each list it keeps only the
// first MaxTouched runs.
func (t Touched) Marshal() []byte {
	t.Written, t.Read = t.Written[:min(len(t.Written), MaxTouched)], t.Read[:min(len(t.Read), MaxTouched)]
	e := codec.NewEncoder(nil)
	e.Version(messageVersion)
	t.encode(e)
	return e.Bytes()
}

// UnmarshalTouched decodes a Reply's data.
func UnmarshalTouched(b []byte) (t Touched, err error) {
	d := codec.NewDecoder(b)
	d.Version(messageVersion)
	t.decode(d)
	if err := d.Finish(); err != nil {
		return Touched{}, fmt.Errorf("decode touched pages: %w", err)
	}
	return t, nil
}

func decodeRuns(d *codec.Decoder, most int) (runs []extent.Run) {
	for range d.Count(most) {
		runs = append(runs, extent.Run{Start: d.Uvarint(), Length: d.Uvarint()})
	}
	return runs
}
