package image

import "sync"

// Phase is the current step of making an image.
type Phase string

// Phases, in the order in which they come.
const (
	PhaseResolve   Phase = "resolve"  // ask the registry what a name means
	PhaseWait      Phase = "wait"     // for another maker of the same image
	PhaseDownload  Phase = "download" // bytes of layers, which are unpacked at the same time
	PhaseUnpack    Phase = "unpack"   // layers
	PhaseBootstrap Phase = "install packages"
	PhasePip       Phase = "install wheels"
	PhasePack      Phase = "pack"
	PhaseVerify    Phase = "verify" // bytes of a snapshot
	PhaseUpload    Phase = "upload" // likewise; blobs that the registry has are not sent
	PhaseDone      Phase = "done"
)

// Progress is the state of the work. Total is 0 while it is unknown.
type Progress struct {
	Phase Phase
	// Done of Total bytes have come, in the phase of downloads, or were
	// processed, in other phases that count bytes.
	Done, Total int64
	// Layer of Layers, counted from 1, is being unpacked. It is set in the
	// phase of unpacking only.
	Layer, Layers int
}

// Reporter calls a progress function, one call at a time.
type Reporter struct {
	mu sync.Mutex // protects the calls, now and came
	// now is the latest progress.
	now    Progress
	came   int64 // bytes, including lost ones
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

// Bytes reports that n more bytes were moved; if n is negative, that they were
// lost.
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
