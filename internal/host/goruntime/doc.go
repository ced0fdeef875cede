// Package goruntime sets up the Go runtime for processes that exist once per
// sandbox and are idle nearly always: the guest's agent, which is copied with
// every fork, and the vmm process. Their monitor thread sleeps longer, garbage
// is rarely collected, and a thread that mostly waits gets the processor soon
// after it wakes.
package goruntime
