package survival

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"

	"agentrun.dev/internal/client/local"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/test/soak"
)

// A parent prints these before and after each operation.
const (
	begins = "+"
	ended  = "-"
)

// work runs many workers at once, forever.
func work(dir string) error {
	s, err := local.Open(dir, microvm.JailPolicy{})
	if err != nil {
		return err
	}
	entries, err := s.List()
	if err != nil {
		return err
	}
	errs := make(chan error)
	for i := range workers() {
		w := newWorker(s, "w"+strconv.Itoa(i), entries)
		go func() { errs <- w.live() }()
	}
	return <-errs
}

func workers() int { return soak.Count(50, 4) }

// worker does every possible operation on a sandbox, on its live fork, on its
// snapshot, and on a fork of that snapshot. It continues with the leftovers of
// an earlier parent.
type worker struct {
	s                      *local.Store
	box, twin, kept, child local.Name
	there, asleep          map[local.Name]bool
}

func newWorker(s *local.Store, name string, left []local.Entry) *worker {
	w := &worker{
		s: s, box: local.Name(name), twin: local.Name(name + "-twin"), kept: local.Name(name + "-kept"), child: local.Name(name + "-child"),
		there: map[local.Name]bool{}, asleep: map[local.Name]bool{},
	}
	for _, e := range left {
		w.there[e.Name], w.asleep[e.Name] = true, e.Status == local.StatusAsleep
	}
	return w
}

// operation is one operation that a worker can do.
type operation struct {
	name string
	do   func(context.Context) error
}

// live does random operations until one fails, and returns its error.
func (w *worker) live() error {
	for {
		possible := w.possible()
		op := possible[rand.IntN(len(possible))]
		fmt.Println(begins + op.name)
		if err := op.do(context.Background()); err != nil {
			return fmt.Errorf("%s of %s: %w", op.name, w.box, err)
		}
		fmt.Println(ended + op.name)
	}
}

// possible lists the operations that are possible now. Some are listed more
// than once, so that a worker seldom has more than two sandboxes: an emulated
// machine can run at most a hundred waiting ones.
func (w *worker) possible() (ops []operation) {
	add := func(times int, name string, do func(context.Context) error) {
		for range times {
			ops = append(ops, operation{name, do})
		}
	}
	remove := func(n local.Name) func(context.Context) error {
		return func(ctx context.Context) error {
			w.there[n], w.asleep[n] = false, false
			return w.s.Remove(ctx, n)
		}
	}
	use := func(n local.Name) func(context.Context) error {
		return func(context.Context) error {
			w.asleep[n] = false
			return say(w.s, n, "hello")
		}
	}
	if !w.there[w.box] {
		from := base
		if w.there[w.kept] {
			from = w.kept
		}
		add(3, "fork", w.making(w.box, func(context.Context) error { return fork(w.s, from, w.box) }))
	} else {
		add(1, "use", use(w.box))
		add(1, "hibernate", func(ctx context.Context) error {
			w.asleep[w.box] = true
			return w.s.Hibernate(ctx, w.box)
		})
		if w.asleep[w.box] {
			add(1, "resume", func(ctx context.Context) error {
				w.asleep[w.box] = false
				return w.s.Resume(ctx, w.box)
			})
		} else {
			add(2, "pause", func(ctx context.Context) error { return w.s.Pause(ctx, w.box) })
		}
		if !w.there[w.twin] {
			add(1, "live fork", w.making(w.twin, func(context.Context) error {
				w.asleep[w.box] = false
				return fork(w.s, w.box, w.twin)
			}))
		}
		if !w.there[w.kept] {
			add(1, "capture", w.making(w.kept, func(ctx context.Context) error {
				w.asleep[w.box] = false
				return w.s.Capture(ctx, w.box, w.kept)
			}))
		}
		add(1, "remove", remove(w.box))
	}
	if w.there[w.twin] {
		add(1, "use", use(w.twin))
		add(4, "remove", remove(w.twin))
	}
	if w.there[w.kept] {
		if !w.there[w.child] {
			add(1, "fork", w.making(w.child, func(context.Context) error { return fork(w.s, w.kept, w.child) }))
		}
		add(1, "delete", remove(w.kept))
	}
	if w.there[w.child] {
		add(1, "use", use(w.child))
		add(1, "pause", func(ctx context.Context) error { return w.s.Pause(ctx, w.child) })
		add(4, "remove", remove(w.child))
	}
	return ops
}

func (w *worker) making(n local.Name, do func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		w.there[n] = true
		return do(ctx)
	}
}

func fork(s *local.Store, from, to local.Name) error {
	f, err := s.Fork(context.Background(), from, []local.Name{to}, engine.Limits{})
	if err != nil {
		return err
	}
	return errors.Join(f.Errs...)
}

// say makes a sandbox repeat a word.
func say(s *local.Store, name local.Name, word string) (err error) {
	ctx := context.Background()
	sb, err := s.Attach(ctx, name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sb.Detach()) }()
	var out bytes.Buffer
	st, err := sb.Agent().Run(ctx, guestrpc.ExecRequest{Argv: []string{"echo", word}}, nil, &out, nil)
	if err == nil && (st.Code != 0 || strings.TrimSpace(out.String()) != word) {
		err = fmt.Errorf("%s said %q with exit code %d", name, out.String(), st.Code)
	}
	return err
}
