package vmm

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/vmm/cpu"
	"agentrun.dev/internal/vmm/guestmem"
	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/internal/vmm/virtio"
	"agentrun.dev/internal/vmm/vmstate"
)

// VM is one machine. Its methods are safe for concurrent use.
type VM struct {
	kvm     *kvm.VM
	mem     *guestmem.Memory
	vcpus   []*vcpu
	threads bool // since Start: each vCPU has a thread that runs it or waits at the gate
	ioapic  *ioapic
	serial  *serial
	console consoleLog
	windows windows
	ports   ports
	nets    []*virtio.Net
	vsock   *virtio.Vsock // nil if the machine has none
	rng     *virtio.RNG
	balloon *virtio.Balloon
	profile cpu.Profile
	devices Devices // the VM closes them; closing protects their sockets
	gate    *gate

	// capturing is held during a capture; capture points to it.
	capturing sync.Mutex
	capture   atomic.Pointer[Capture]

	endOnce sync.Once
	exit    vmstate.Exit // set before done is closed
	done    chan struct{}

	closing sync.Mutex // held by Close and Plug

	mu      sync.Mutex // protects all following fields
	started bool
	paused  bool
	closed  bool
	stopped *ClockState // the guest's time while it stands still
}

// ErrEnded means that the guest is no longer running.
var ErrEnded = errors.New("the guest has ended")

// Start lets the guest run for the first time.
func (vm *VM) Start() error {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if vm.started || vm.closed {
		return errors.New("start: the guest was started before")
	}
	vm.started = true
	if vm.stopped != nil {
		if err := vm.resumeDevices(); err != nil {
			return fmt.Errorf("start: %w", err)
		}
	}
	vm.gate.release()
	// The threads start only now. A goroutine that is about to wait for the guest
	// hands its thread to a vCPU; a vCPU that waited at the gate would have to be
	// woken first.
	vm.threads = true
	for _, c := range vm.vcpus {
		go c.run()
	}
	return nil
}

// Done is closed when the guest has ended.
func (vm *VM) Done() <-chan struct{} { return vm.done }

// Wait waits until the guest has ended and returns how it ended.
func (vm *VM) Wait() vmstate.Exit {
	<-vm.done
	return vm.exit
}

// Stop ends the guest at once, as if its power was cut.
func (vm *VM) Stop() { vm.end(vmstate.Exit{Reason: vmstate.Stopped}) }

// end records how the guest ended and ends the vCPUs. Only the first call has
// an effect. It must not wait for the vCPUs: one of them may be the caller.
func (vm *VM) end(e vmstate.Exit) {
	vm.endOnce.Do(func() {
		vm.exit = e
		vm.gate.close(vm.vcpus)
		close(vm.done)
	})
}

// Pause stops all vCPUs and devices. When it returns, neither accesses guest
// memory or a disk any more, and no access of the guest is half done.
func (vm *VM) Pause() error {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if !vm.started || vm.closed {
		return fmt.Errorf("pause: %w", ErrEnded)
	}
	if vm.paused {
		vm.wakeOn(nil)
		return nil
	}
	if !vm.gate.hold(vm.vcpus) {
		return fmt.Errorf("pause: %w", ErrEnded)
	}
	for _, d := range vm.windows.virtio {
		d.Pause()
	}
	if err := vm.stopClock(); err != nil {
		for _, d := range vm.windows.virtio {
			d.Resume()
		}
		vm.gate.release()
		return fmt.Errorf("pause: %w", err)
	}
	vm.paused = true
	return nil
}

// Park pauses the guest until the host sends data over vsock. knocked is then
// called, once. Pause and Resume cancel that.
func (vm *VM) Park(knocked func()) error {
	if vm.vsock == nil {
		return errors.New("park: this guest has no vsock device to be woken by")
	}
	if err := vm.Pause(); err != nil {
		return err
	}
	vm.wakeOn(knocked)
	return nil
}

func (vm *VM) wakeOn(knocked func()) {
	if vm.vsock != nil {
		vm.vsock.WakeOn(knocked)
	}
}

// Paused reports whether the guest is paused.
func (vm *VM) Paused() bool {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	return vm.paused
}

// Resume lets a paused guest continue.
func (vm *VM) Resume() error {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if vm.closed {
		return fmt.Errorf("resume: %w", ErrEnded)
	}
	if !vm.paused {
		return nil
	}
	if err := vm.resumeDevices(); err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	vm.paused = false
	vm.gate.release()
	return nil
}

// resumeDevices lets the guest's time and its devices continue, just before its
// processors do.
func (vm *VM) resumeDevices() error {
	if err := vm.startClock(); err != nil {
		return err
	}
	for _, d := range vm.windows.virtio {
		d.Resume()
	}
	return nil
}

// Close ends the guest if it still runs, and frees all resources. It returns
// how the guest ended.
func (vm *VM) Close() (vmstate.Exit, error) {
	vm.Stop()
	vm.closing.Lock()
	defer vm.closing.Unlock()
	vm.mu.Lock()
	closed := vm.closed
	vm.closed = true
	vm.mu.Unlock()
	if closed {
		return vm.exit, nil
	}
	// A vCPU may wait for a capture to save its page: the capture still does.
	vm.leave()
	if c := vm.capture.Load(); c != nil {
		c.Cancel(ErrEnded)
	}
	vm.capturing.Lock() // the capture reads guest memory
	defer vm.capturing.Unlock()
	return vm.exit, errors.Join(vm.free(), vm.devices.close())
}

// Plug replaces the socket of network interface i. The VM takes over the new
// socket. Frames that wait in the old one are lost.
func (vm *VM) Plug(i int, socket *os.File) (err error) {
	vm.closing.Lock()
	defer vm.closing.Unlock()
	vm.mu.Lock()
	closed := vm.closed
	vm.mu.Unlock()
	switch {
	case closed:
		err = ErrEnded
	case i < 0 || i >= len(vm.nets):
		err = fmt.Errorf("there is no interface %d, but %d", i, len(vm.nets))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("plug in a wire: %w", err), socket.Close())
	}
	old, err := vm.nets[i].Plug(socket)
	if err != nil {
		return errors.Join(fmt.Errorf("plug in a wire: %w", err), socket.Close())
	}
	vm.devices.Nets[i].Socket = socket
	return old.Close()
}

// leave ends the vCPUs' threads and waits for them.
func (vm *VM) leave() {
	if vm.threads {
		vm.gate.close(vm.vcpus)
		vm.gate.waitGone(len(vm.vcpus))
	}
}

// free releases all that NewSpare and createDevices made.
func (vm *VM) free() error {
	vm.leave()
	var errs []error
	for _, d := range vm.windows.virtio {
		d.Close()
	}
	for _, c := range vm.vcpus {
		errs = append(errs, c.kvm.Close())
	}
	if vm.kvm != nil {
		errs = append(errs, vm.kvm.Close())
	}
	if vm.mem != nil {
		errs = append(errs, vm.mem.Close())
	}
	return errors.Join(errs...)
}

// Console returns the end of the guest's output.
func (vm *VM) Console() Console { return vm.console.snapshot() }

// Connect opens a stream to a port in the guest. conn is the host's end, one of
// a non-blocking unix stream pair; the VM takes it over. result is called once,
// with nil when the guest has accepted. Copies of the guest continue the last
// stream that was made as a standby, if the stream is idle when they are made.
func (vm *VM) Connect(port uint32, conn *os.File, standby bool, result func(error)) {
	if vm.vsock == nil {
		result(errors.Join(errors.New("connect: this guest has no vsock device"), conn.Close()))
		return
	}
	if standby {
		vm.vsock.ConnectStandby(port, conn, result)
		return
	}
	vm.vsock.Connect(port, conn, result)
}

// Settle waits, no longer than limit, until the guest has finished two tasks that
// each copy would otherwise repeat. First, the guest gives back unused memory: it
// reports free pages some seconds after they became free, and a report followed by
// quiet is the last. Second, its kernel reseeds its random number generator from
// time to time: that must not be about to happen.
func (vm *VM) Settle(quiet, limit time.Duration) {
	end := time.NewTimer(limit)
	defer end.Stop()
	var calm <-chan time.Time // nil before the first report
	for {
		select {
		case <-vm.balloon.Reported():
			calm = time.After(quiet)
		case <-calm:
			vm.awaitFeeding(end.C)
			return
		case <-end.C:
			return
		case <-vm.done:
			return
		}
	}
}

// feedingSoon is how much time must remain before the kernel reseeds its generator
// again: enough for a capture and for a copy's first answer.
const feedingSoon = 800 * time.Millisecond

// awaitFeeding waits until the kernel has reseeded its generator, if it is
// about to.
func (vm *VM) awaitFeeding(end <-chan time.Time) {
	asked := vm.rng.Asked()
	for vm.rng.Due(feedingSoon) {
		select {
		case <-asked:
		case <-end:
			return
		case <-vm.done:
			return
		}
	}
}

// SetBalloon asks the guest to give back this much of its memory.
func (vm *VM) SetBalloon(bytes uint64) { vm.balloon.SetTarget(uint32(bytes / guestmem.PageSize)) }
