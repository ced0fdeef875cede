package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// DaemonGet measures look-ups of sandboxes by name, with all records and with one,
// while other clients ask for missing sandboxes.
type DaemonGet struct {
	Others  int        `json:"others"`
	Process DaemonPair `json:"in_process"`
	REST    DaemonPair `json:"rest"`
}

// DaemonPair is one measurement with one record and with all of them.
type DaemonPair struct {
	Empty Summary `json:"empty"`
	Full  Summary `json:"full"`
}

// RatioP50 is the median time with all records, relative to that with one.
func (p DaemonPair) RatioP50() float64 { return p.Full.P50 / p.Empty.P50 }

// RatioP99 is the same of the 99th percentile.
func (p DaemonPair) RatioP99() float64 { return p.Full.P99 / p.Empty.P99 }

// DaemonPage is one page of a list.
type DaemonPage struct {
	Process Summary `json:"in_process"`
	REST    Summary `json:"rest"`
}

// askers runs some clients that call get again and again, and measures each call.
// Meanwhile other clients ask for missing sandboxes.
func askers(d time.Duration, some, others int, get, miss func(i int) error) ([]time.Duration, error) {
	var all sync.WaitGroup
	var stop atomic.Bool
	took, errs := make([][]time.Duration, some), make([]error, some+others)
	for i := range others {
		all.Go(func() {
			for e := &errs[some+i]; !stop.Load() && *e == nil; {
				*e = miss(i)
			}
		})
	}
	for i := range some {
		all.Go(func() {
			for !stop.Load() && errs[i] == nil {
				begin := time.Now()
				errs[i] = get(i)
				took[i] = append(took[i], time.Since(begin))
			}
		})
	}
	time.Sleep(d)
	stop.Store(true)
	all.Wait()
	return slices.Concat(took...), errors.Join(errs...)
}

// measureGets lets the two states take turns. Only one of them is in memory at a
// time.
func measureGets(ctx context.Context, cfg DaemonConfig, empty, full *nodeState) (DaemonGet, error) {
	out := DaemonGet{Others: cfg.Others}
	var process, rest [2][]time.Duration
	for range cfg.Rounds {
		for i, s := range []*nodeState{empty, full} {
			in, by, err := s.gets(ctx)
			if err != nil {
				return out, err
			}
			process[i], rest[i] = append(process[i], in...), append(rest[i], by...)
		}
	}
	out.Process = DaemonPair{Summarize(process[0]), Summarize(process[1])}
	out.REST = DaemonPair{Summarize(rest[0]), Summarize(rest[1])}
	return out, nil
}

// gets looks up one sandbox again and again, in process and through the REST API.
func (s *nodeState) gets(ctx context.Context) (process, rest []time.Duration, err error) {
	n, err := s.open(ctx, journal.Cost{})
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	there, missing := recordKey(s.records/2), sandbox.Key{Namespace: "another", Name: "missing"}
	settle()
	process, err = askers(s.cfg.For, 1, s.cfg.Others, func(int) error {
		_, err := n.manager.Sandbox(ctx, there)
		return err
	}, func(int) error {
		if _, err := n.manager.Sandbox(ctx, missing); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			return fmt.Errorf("a sandbox that is not there: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	const some = 4 // more clients would be a load by themselves
	callers, err := n.callers(ctx, some+s.cfg.Others)
	if err != nil {
		return nil, nil, err
	}
	settle()
	rest, err = askers(s.cfg.For, some, s.cfg.Others,
		func(i int) error { return callers[i].get(ctx, sandboxPath(there), http.StatusOK) },
		func(i int) error { return callers[some+i].get(ctx, sandboxPath(missing), http.StatusNotFound) })
	return process, rest, err
}

// measurePages lists pages of 100 records, at positions all over the list.
func measurePages(ctx context.Context, cfg DaemonConfig, full *nodeState) (out DaemonPage, err error) {
	n, err := full.open(ctx, journal.Cost{})
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	callers, err := n.callers(ctx, 1)
	if err != nil {
		return out, err
	}
	const page = 100
	at := 0
	next := func() string { // returns a position in the list
		at = (at + 7*page) % max(1, cfg.Records-page)
		return string(recordKey(at).Name) + "/"
	}
	settle()
	process, err := askers(cfg.For, 1, 0, func(int) error {
		got, err := n.manager.Sandboxes(ctx, sandbox.SandboxesRequest{Namespace: sandbox.DefaultNamespace, Page: sandbox.Page{After: next(), Limit: page}})
		if err == nil && len(got) < min(page, cfg.Records-page) {
			err = fmt.Errorf("a page has %d sandboxes", len(got))
		}
		return err
	}, nil)
	if err != nil {
		return out, err
	}
	settle()
	rest, err := askers(cfg.For, 1, 0, func(int) error {
		return callers[0].get(ctx, fmt.Sprintf("/v1/namespaces/%s/sandboxes?limit=%d", sandbox.DefaultNamespace, page), http.StatusOK)
	}, nil)
	return DaemonPage{Summarize(process), Summarize(rest)}, err
}

func sandboxPath(k sandbox.Key) string {
	return fmt.Sprintf("/v1/namespaces/%s/sandboxes/%s", k.Namespace, k.Name)
}

// caller is a client of the REST API with a connection of its own.
type caller struct{ http.Client }

// callers serves the node's API, and returns clients of it.
func (n *benchNode) callers(ctx context.Context, count int) ([]*caller, error) {
	socket := filepath.Join(n.folder, "socket")
	if _, err := n.serve(ctx, socket); err != nil {
		return nil, err
	}
	out := make([]*caller, count)
	for i := range out {
		transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}}
		out[i] = &caller{http.Client{Transport: transport}}
	}
	n.undo = append(n.undo, func() error {
		for _, c := range out {
			c.CloseIdleConnections()
		}
		return nil
	})
	return out, nil
}

// get reads an answer to its end.
func (c *caller) get(ctx context.Context, path string, want int) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+path, nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err == nil && resp.StatusCode != want {
		err = fmt.Errorf("GET %s: %s", path, resp.Status)
	}
	return err
}
