package virtio

// VsockState is a Vsock at rest. Connections are not part of it: their other
// ends are processes of the host, and a restored guest gets a transport reset.
type VsockState struct {
	// NextPort goes on counting, so that a new connection is not taken for one
	// from before the capture.
	NextPort uint32
	// ResetDue says that the guest has yet to handle a transport reset.
	ResetDue bool
}

// Save describes the device; it must be paused.
func (d *Vsock) Save() VsockState {
	d.mu.Lock()
	defer d.mu.Unlock()
	return VsockState{NextPort: d.nextPort, ResetDue: d.resetDue || d.resetUnread}
}

// Restore prepares a fresh device, before MMIO.Restore.
func (d *Vsock) Restore(s VsockState) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.nextPort = min(max(s.NextPort, vsockFirstPort), vsockLastPort)
	d.resetDue = s.ResetDue
	return nil
}
