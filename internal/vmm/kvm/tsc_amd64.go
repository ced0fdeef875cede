package kvm

// HostTSC reads the host's time stamp counter.
//
//go:noescape
func HostTSC() uint64
