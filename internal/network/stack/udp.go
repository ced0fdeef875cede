package stack

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// flowQueue is how many datagrams may wait for a flow to be dialled, or to be sent.
// flowBytes bounds their bytes. A single datagram of any size may wait.
const (
	flowQueue = 16
	flowBytes = 32 << 10
)

// flow is a pair of UDP addresses: one socket outside.
type flow struct {
	w     *Wire
	tuple Tuple
	// first is the start of the packet that has opened the flow. ICMP errors quote
	// it.
	first  []byte
	ctx    context.Context
	close  context.CancelFunc
	queue  chan []byte
	queued atomic.Int64 // bytes in queue
	timer  tcpip.Timer
	active atomic.Int64 // when the last datagram passed
}

// datagram handles a UDP datagram of the sandbox's. It never waits.
func (w *Wire) datagram(p *packet) {
	udp := header.UDP(p.payload)
	if len(udp) < header.UDPMinimumSize || int(udp.Length()) < header.UDPMinimumSize || int(udp.Length()) > len(udp) ||
		udp.SourcePort() == 0 || udp.DestinationPort() == 0 {
		w.drop(DropMalformed)
		return
	}
	data := p.payload[header.UDPMinimumSize:udp.Length()]
	t := Tuple{
		UDP,
		netip.AddrPortFrom(p.from, udp.SourcePort()),
		netip.AddrPortFrom(p.to, udp.DestinationPort()),
	}
	if w.isResolver(t.Outside) {
		w.query(t, data)
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	f := w.flows[t]
	if f == nil {
		if len(w.flows) >= w.cfg.Limits.Flows || w.closed || !w.charge(w.flowUsage()) {
			w.drop(DropLimit)
			return
		}
		f = w.openFlow(t, p.all)
	}
	// The queue does not grow meanwhile, because w.mu is held.
	if waits := int(f.queued.Load()); len(f.queue) == flowQueue || waits > 0 && waits+len(data) > flowBytes {
		w.drop(DropFull)
		return
	}
	f.queued.Add(int64(len(data)))
	f.queue <- slices.Clone(data)
}

// flowUsage counts the resources of a flow: a socket, the waiting datagrams, and one
// incoming datagram.
func (w *Wire) flowUsage() usage {
	return usage{flowMemory + max(flowBytes, w.cfg.MTU) + w.cfg.MTU, 1}
}

// openFlow begins a flow. The caller holds w.mu.
func (w *Wire) openFlow(t Tuple, first []byte) *flow {
	f := &flow{w: w, tuple: t, first: slices.Clone(first[:min(len(first), maxQuote)]), queue: make(chan []byte, flowQueue)}
	f.ctx, f.close = context.WithCancel(w.ctx)
	f.touch()
	f.timer = w.clock.AfterFunc(w.cfg.Limits.FlowIdle, f.expire)
	if w.flows == nil {
		w.flows = map[Tuple]*flow{}
	}
	w.flows[t] = f
	w.spawn(f.run)
	return f
}

func (f *flow) now() int64 {
	return int64(f.w.clock.NowMonotonic().Sub(tcpip.MonotonicTime{}))
}

func (f *flow) touch() { f.active.Store(f.now()) }

// expire ends a flow that has been idle for long enough.
func (f *flow) expire() {
	if left := f.w.cfg.Limits.FlowIdle - time.Duration(f.now()-f.active.Load()); left > 0 {
		f.w.mu.Lock() // waits until openFlow has set the timer
		defer f.w.mu.Unlock()
		f.timer.Reset(left)
		return
	}
	f.close()
}

// run dials, and forwards the sandbox's datagrams.
func (f *flow) run() {
	defer f.remove()
	remote, err := f.w.out.DialUDP(f.ctx, f.tuple.Inside, f.tuple.Outside)
	if err != nil {
		f.w.answer(f.w.unreachableFor(f.first, portUnreachable))
		return
	}
	stop := context.AfterFunc(f.ctx, func() { _ = remote.Close() }) // closing a datagram socket loses nothing
	received := make(chan struct{})
	go func() {
		defer close(received)
		f.receive(remote)
	}()
	for f.ctx.Err() == nil {
		select {
		case b := <-f.queue:
			f.queued.Add(-int64(len(b)))
			f.touch()
			if _, err := remote.Write(b); err != nil && f.failed(err) {
				f.close()
			}
		case <-f.ctx.Done():
		}
	}
	if stop() {
		_ = remote.Close()
	}
	<-received
}

// failed handles an error of the socket, and reports whether the error ends the flow.
// A port that is closed outside appears closed inside.
func (f *flow) failed(err error) bool {
	if errors.Is(err, syscall.ECONNREFUSED) {
		f.w.answer(f.w.unreachableFor(f.first, portUnreachable))
		return false
	}
	return !errors.Is(err, syscall.EHOSTUNREACH) && !errors.Is(err, syscall.ENETUNREACH) && !errors.Is(err, syscall.EMSGSIZE) && !errors.Is(err, syscall.ENOBUFS)
}

// receive forwards datagrams from outside to the sandbox.
func (f *flow) receive(remote net.Conn) {
	defer f.close()
	largest := f.w.maxDatagram(f.tuple.Inside.Addr())
	b := make([]byte, largest+1)
	for {
		n, err := remote.Read(b)
		switch {
		case err != nil:
			if f.ctx.Err() != nil || f.failed(err) {
				return
			}
			continue
		case n > largest:
			f.w.drop(DropTooLong)
			continue
		}
		f.touch()
		m := f.w.newDatagram(f.tuple.Outside, f.tuple.Inside, b[:n])
		f.w.transmit(vectorsOf(m), len(m))
	}
}

func (f *flow) remove() {
	f.close()
	f.w.mu.Lock()
	defer f.w.mu.Unlock()
	f.timer.Stop()
	delete(f.w.flows, f.tuple)
	f.w.release(f.w.flowUsage())
	if len(f.w.flows) == 0 {
		f.w.flows = nil
	}
}

// maxDatagram is the maximum payload of a datagram to a without fragments.
func (w *Wire) maxDatagram(a netip.Addr) int {
	if a.Is6() {
		return w.cfg.MTU - header.IPv6MinimumSize - header.UDPMinimumSize
	}
	return w.cfg.MTU - header.IPv4MinimumSize - header.UDPMinimumSize
}
