package virtio

import (
	"os"
	"testing"

	"agentrun.dev/internal/network/wire"
	"agentrun.dev/internal/vmm/guestmem"
	"golang.org/x/sys/unix"
)

// BenchmarkQueue takes a three-descriptor chain and returns it.
func BenchmarkQueue(b *testing.B) {
	for name, add := range map[string]func(*guest, ...buf) uint16{
		"direct":   func(g *guest, bufs ...buf) uint16 { return g.add(0, bufs...) },
		"indirect": func(g *guest, bufs ...buf) uint16 { return g.addIndirect(0, bufs...) },
	} {
		b.Run(name, func(b *testing.B) {
			g, _, q := queueGuest(b)
			add(g, buf{gpa: 0x8000, len: 16}, buf{gpa: 0x9000, len: 4096, write: true}, buf{gpa: 0xa000, len: 1, write: true})
			b.ReportAllocs()
			for b.Loop() {
				c, ok, err := q.Pop()
				if !ok || err != nil {
					b.Fatal(ok, err)
				}
				if err := q.Push(c.Head, 4097); err != nil {
					b.Fatal(err)
				}
				q.WantsInterrupt()
				q.Unpop() // take the same one again
			}
		})
	}
}

// BenchmarkVsockEcho sends 64 bytes through the device to a host that echoes
// them, and waits for the answer in guest memory.
func BenchmarkVsockEcho(b *testing.B) {
	g := newVsockGuest(b, 0)
	g.feed(8)
	k, host := g.dial(9)
	go echo(host)
	ping := make([]byte, 64)
	b.ReportAllocs()
	for b.Loop() {
		g.fwd = uint32(g.dev.Stats().RxBytes)
		g.tx(k, opData, 0, ping)
		for {
			if h, _ := g.rx(); h.op == opData {
				break
			}
		}
	}
}

func echo(f *os.File) {
	p := make([]byte, 4096)
	for {
		n, err := f.Read(p)
		if err != nil {
			return
		}
		if _, err := f.Write(p[:n]); err != nil {
			return
		}
	}
}

// BenchmarkBlockRead reads 4 KiB from a file in the page cache: inline, without
// the switch to the worker, and through the worker.
func BenchmarkBlockRead(b *testing.B) {
	setup := func(b *testing.B) (*guest, *Block, uint16) {
		_, d := openDisk(b, 2048, false)
		dev := NewBlock(BlockConfig{Disk: d})
		g := startGuest(b, dev)
		head := g.chain(g.rings[0], g.out(blkHeader(blkIn, 8)), g.in(4096), g.in(1))
		b.SetBytes(4096)
		b.ReportAllocs()
		return g, dev, head
	}
	b.Run("device", func(b *testing.B) {
		g, dev, head := setup(b)
		dev.worker.stop()
		for b.Loop() {
			g.publish(g.rings[0], head)
			if !dev.step() {
				b.Fatal("nothing done")
			}
		}
		dev.worker.start(dev.step)
	})
	b.Run("worker", func(b *testing.B) {
		g, _, head := setup(b)
		for b.Loop() {
			g.publish(g.rings[0], head)
			g.kick(0)
			g.wait(0)
		}
	})
}

// BenchmarkNetTransmit sends a full frame, or a segment of 60 KB in 15 pieces, to a
// socket that is read all the time.
func BenchmarkNetTransmit(b *testing.B) {
	h, long := tso(60000)
	for name, p := range map[string][]byte{"frame": netPacket(frame(1514, 1)), "segment": netPacketOf(h, long)} {
		b.Run(name, func(b *testing.B) {
			n, host := newNet(b, unix.SOCK_DGRAM)
			go func() {
				p := make([]byte, wire.MaxMessage)
				for {
					if _, err := host.Read(p); err != nil {
						return
					}
				}
			}()
			g := startGuest(b, n)
			head := g.chain(g.rings[netTx], g.cut(p, guestmem.PageSize)...)
			b.SetBytes(int64(len(p)))
			b.ReportAllocs()
			for b.Loop() {
				g.publish(g.rings[netTx], head)
				g.kick(netTx)
				g.wait(netTx)
			}
		})
	}
}
