// Package goruntime sets the Go runtime up for processes that exist once per
// sandbox and are idle nearly always: the guest's agent, which is copied with
// every fork, and the process of a VM. Its monitor thread sleeps longer, garbage
// is rarely collected, and a thread that mostly waits is woken soon.
package goruntime
