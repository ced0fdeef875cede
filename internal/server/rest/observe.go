package rest

import (
	"context"
	"net/http"
	"slices"
	"strings"

	"agentrun.dev/internal/sandbox"
)

// Observer observes requests, to count and measure them. Its methods are called
// from many goroutines at once, and must not wait.
type Observer interface {
	// Request is called when a request has come. The function that it returns is
	// called when the request has been answered. The request goes on with the
	// context.
	Request(r *http.Request) (context.Context, func(Answer))
}

// Answer describes the answer to a request. The numbers of routes, methods and
// codes are bounded, whatever clients send.
type Answer struct {
	// Route is the pattern that was served, such as /v1/version. It is empty
	// for a request without a route.
	Route  string
	Method string
	Status int
	Code   sandbox.Code // of an error
	Bytes  int64
}

// Observers makes one observer of several. Without any, that observer does
// nothing.
func Observers(all ...Observer) Observer { return observers(all) }

type observers []Observer

func (all observers) Request(r *http.Request) (context.Context, func(Answer)) {
	ends := make([]func(Answer), len(all))
	ctx := r.Context()
	for i, o := range all {
		ctx, ends[i] = o.Request(r.WithContext(ctx))
	}
	return ctx, func(a Answer) {
		for _, end := range slices.Backward(ends) {
			end(a)
		}
	}
}

// knownMethods are the methods that are counted by name.
var knownMethods = []string{
	http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions,
}

// answer returns the answer as the recorder saw it.
func (w *recorder) answer(method string) Answer {
	if !slices.Contains(knownMethods, method) {
		method = "other"
	}
	_, route, found := strings.Cut(w.route, " ") // a pattern begins with its method
	if !found {
		route = w.route
	}
	return Answer{Route: route, Method: method, Status: w.status, Code: w.code, Bytes: w.bytes}
}
