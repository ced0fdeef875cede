package virtio

import "fmt"

// MMIOState is the state of a paused transport: the driver's registers and the
// positions of its queues.
type MMIOState struct {
	DeviceType        uint32
	Status            uint32
	InterruptStatus   uint32
	ConfigGeneration  uint32
	DeviceFeaturesSel uint32
	DriverFeaturesSel uint32
	QueueSel          uint32
	DriverFeatures    uint64
	NumQueues         uint32
	Queues            [MaxQueues]QueueState
}

// Save returns the state of a paused transport. The device's own state is
// separate.
func (m *MMIO) Save() (MMIOState, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.paused.Load() {
		return MMIOState{}, fmt.Errorf("save virtio device %d: %w", m.dev.Type(), errNotPaused)
	}
	s := MMIOState{
		DeviceType:        m.dev.Type(),
		Status:            m.status.Load(),
		InterruptStatus:   m.interrupts.Load(),
		ConfigGeneration:  m.generation.Load(),
		DeviceFeaturesSel: m.deviceFeaturesSel,
		DriverFeaturesSel: m.driverFeaturesSel,
		QueueSel:          m.queueSel,
		DriverFeatures:    m.driverFeatures,
		NumQueues:         uint32(len(m.queues)),
	}
	for i, q := range m.queues {
		s.Queues[i] = q.save()
	}
	return s, nil
}

// Restore sets the state of a new transport and, if the driver was running,
// activates the device. The device is paused until Resume. The state may come
// from a damaged file: if it does not fit the device or the memory, Restore
// returns an error and leaves the transport unused.
func (m *MMIO) Restore(s MMIOState) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.checkState(s); err != nil {
		return fmt.Errorf("restore virtio device %d: %w", m.dev.Type(), err)
	}
	queues := make([]*Queue, len(m.queues))
	for i, q := range m.queues {
		var err error
		indirect := s.DriverFeatures&FeatureIndirectDesc != 0
		if queues[i], err = restoreQueue(m.mem, q.max, indirect, s.Queues[i]); err != nil {
			return fmt.Errorf("restore virtio device %d: queue %d: %w", m.dev.Type(), i, err)
		}
	}
	m.dev.Pause()
	m.paused.Store(true)
	m.queues = queues
	m.deviceFeaturesSel, m.driverFeaturesSel = s.DeviceFeaturesSel, s.DriverFeaturesSel
	m.queueSel, m.driverFeatures = s.QueueSel, s.DriverFeatures
	m.generation.Store(s.ConfigGeneration)
	m.interrupts.Store(s.InterruptStatus)
	m.status.Store(s.Status)
	if s.Status&(statusDriverOK|statusNeedsReset) == statusDriverOK {
		m.activate()
	}
	return nil
}

// checkState accepts only states that writeStatus and acceptFeatures can
// produce.
func (m *MMIO) checkState(s MMIOState) error {
	const ladder = statusAcknowledge | statusDriver | statusFeaturesOK | statusDriverOK
	switch s.Status & ladder {
	case 0, statusAcknowledge, statusAcknowledge | statusDriver:
	case ladder &^ statusDriverOK, ladder:
		if s.DriverFeatures&^m.offered() != 0 || s.DriverFeatures&FeatureVersion1 == 0 {
			return fmt.Errorf("features %#x were negotiated, %#x are offered", s.DriverFeatures, m.offered())
		}
	default:
		return fmt.Errorf("impossible status %#x", s.Status)
	}
	switch {
	case s.DeviceType != m.dev.Type():
		return fmt.Errorf("state of device type %d", s.DeviceType)
	case s.NumQueues != uint32(len(m.queues)):
		return fmt.Errorf("%d queues, device has %d", s.NumQueues, len(m.queues))
	case s.Status&^uint32(statusAll|statusNeedsReset) != 0:
		return fmt.Errorf("unknown status bits %#x", s.Status)
	case s.InterruptStatus&^uint32(interruptUsed|interruptConfig) != 0:
		return fmt.Errorf("unknown interrupt bits %#x", s.InterruptStatus)
	}
	return nil
}
