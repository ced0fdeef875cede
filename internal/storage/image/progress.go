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
	PhaseVerify    Phase = "verify" // bytes of a snapshot
	PhaseUpload    Phase = "upload" // likewise; what a registry has is not sent
	PhaseDone      Phase = "done"
)

// Progress is where the work stands. Total is 0 when it is not known.
type Progress struct {
	Phase Phase
	// Done of Total bytes are here, in the phase of downloads, or dealt with, in
	// others that count bytes.
	Done, Total int64
	// Layer of Layers is unpacked, counted from 1, in the phase of unpacking.
	Layer, Layers int
}

// Reporter calls a progress function, one call at a time.
type Reporter struct {
	mu sync.Mutex // protects the calls, now and came
	// now is where the work stands.
	now    Progress
	came   int64 // bytes, those that were lost included
	report func(Progress)
}

// NewReporter makes one; f may be nil.
func NewReporter(f func(Progress)) *Reporter { return &Reporter{report: f} }

// Phase reports that a phase has begun.
func (r *Reporter) Phase(p Progress) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now = p
	r.call()
}

// Bytes reports that so many more were moved, or were lost if negative.
func (r *Reporter) Bytes(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now.Done += n
	r.came += max(n, 0)
	if r.now.Total > 0 && r.now.Layer == 0 {
		r.call()
	}
}

func (r *Reporter) fetched() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.came
}

func (r *Reporter) call() {
	if r.report != nil {
		r.report(r.now)
	}
}
