package rest

import (
	"fmt"
	"testing"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
)

// BenchmarkExec runs a program over REST, and by a bare call to the agent.
func BenchmarkExec(b *testing.B) {
	n := newNode(b)
	n.setUp()
	n.claim("a")
	u, err := n.Manager.Use(b.Context(), sandbox.Key{Namespace: "default", Name: "a"})
	if err != nil {
		b.Fatal(err)
	}
	defer u.Close()
	req := guestrpc.ExecRequest{Argv: []string{"true"}, User: u.Record().User, Workdir: u.Record().Workdir}
	c := n.newClient()
	for _, clients := range []int{1, 20} {
		for _, way := range []struct {
			name string
			run  func() error
		}{
			{"agent", func() error {
				_, err := u.Agent().Run(b.Context(), req, nil, nil, nil)
				return err
			}},
			{"rest", func() error {
				_, err := c.Run(b.Context(), "a", rest.ExecRequest{Argv: []string{"true"}})
				return err
			}},
		} {
			b.Run(fmt.Sprintf("%s/clients=%d", way.name, clients), func(b *testing.B) {
				b.SetParallelism(clients) // per processor
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						if err := way.run(); err != nil {
							b.Error(err)
						}
					}
				})
			})
		}
	}
}
