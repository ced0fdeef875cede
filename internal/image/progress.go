package image

import "sync"

// Phase is what making an image is busy with.
type Phase string

// Phases, in the order in which they come.
const (
	PhaseResolve   Phase = "resolve"  // ask the registry what a name means
	PhaseWait      Phase = "wait"     // for someone else who makes the same image
	PhaseDownload  Phase = "download" // bytes of layers; unpacking goes on beside it
	PhaseUnpack    Phase = "unpack"   // layers
	PhaseBootstrap Phase = "install packages"
	PhasePip       Phase = "install wheels"
	PhasePack      Phase = "pack"
	PhaseDone      Phase = "done"
)

// Progress is where the work stands. Total is 0 when it is not known.
type Progress struct {
	Phase Phase
	// Done of Total bytes are here, in the phase of downloads.
	Done, Total int64
	// Layer of Layers is unpacked, counted from 1, in the phase of unpacking.
	Layer, Layers int
}

// reporter calls a progress function, one call at a time.
type reporter struct {
	mu sync.Mutex // protects the calls, now and came
	// now is where the work stands.
	now    Progress
	came   int64 // bytes, those that were lost included
	report func(Progress)
}

func newReporter(f func(Progress)) *reporter { return &reporter{report: f} }

// phase reports that a phase has begun.
func (r *reporter) phase(p Progress) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now = p
	r.call()
}

// bytes reports that so many more were downloaded, or were lost if negative.
func (r *reporter) bytes(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now.Done += n
	r.came += max(n, 0)
	if r.now.Phase == PhaseDownload {
		r.call()
	}
}

func (r *reporter) fetched() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.came
}

func (r *reporter) call() {
	if r.report != nil {
		r.report(r.now)
	}
}
