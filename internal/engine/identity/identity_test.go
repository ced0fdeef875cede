package identity

import (
	"context"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
)

// silentGuest has an agent that was stopped when the guest was captured.
type silentGuest struct {
	guestrpc.Handler
	end chan struct{}
}

func (g silentGuest) Renew(context.Context, *guestrpc.RenewRequest) (guestrpc.RenewReply, error) {
	<-g.end
	return guestrpc.RenewReply{}, nil
}

// TestSilentAgent: the wait for a fork whose agent does not answer is bounded.
func TestSilentAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		guest := silentGuest{end: make(chan struct{})}
		go func() { _ = guestrpc.Serve(context.Background(), theirs, guest) }()
		c, err := guestrpc.NewClient(t.Context(), ours)
		if err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		err = new(Self).Renew(t.Context(), c, false)
		if took := time.Since(begin); err == nil || took != AnswerPatience {
			t.Errorf("%v after %v", err, took)
		}
		_ = c.Close()
		close(guest.end)
	})
}
