package rest

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"

	"github.com/coder/websocket"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// maxMessage is the size of the largest message that a client may send over a
// WebSocket.
const maxMessage = 1 << 20

// ConnectExec implements rest.ServerInterface.
func (a *api) ConnectExec(w http.ResponseWriter, r *http.Request, namespace, name, id string, q rest.ConnectExecParams) {
	u, s, err := a.attach(r, namespace, name, id, q.Stdout, q.Stderr)
	if err != nil {
		a.fail(w, r, err)
		return
	}
	defer u.Close()
	defer s.Close()
	// Accept itself rejects requests that are not WebSocket handshakes, and
	// those from pages of other sites.
	conn, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	defer func() { _ = conn.CloseNow() }()
	conn.SetReadLimit(maxMessage)
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	go func() {
		defer cancel()
		defer s.Close() // a client that has left takes no more events
		a.takeInput(ctx, conn, u.Agent(), id)
	}()
	copyExec(s, func(event rest.ExecEvent) error {
		// A principal that has lost its rights learns nothing more, not even why the stream
		// ends. Of all contexts made from it, this one ends first.
		if err := r.Context().Err(); err != nil {
			return err
		}
		return a.sendMessage(ctx, conn, event)
	})
	_ = conn.Close(websocket.StatusNormalClosure, "")
}

func (a *api) sendMessage(ctx context.Context, conn *websocket.Conn, event rest.ExecEvent) error {
	data, err := json.Marshal(event)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, a.StallTimeout)
	defer cancel()
	return conn.Write(ctx, websocket.MessageText, data)
}

// takeInput handles a client's messages until the client leaves. An error in a
// message is reported in an event, and does not end the rest.
func (a *api) takeInput(ctx context.Context, conn *websocket.Conn, agent *guestrpc.Client, id string) {
	for {
		kind, data, err := conn.Read(ctx)
		if err != nil {
			return
		}
		var in rest.ExecInput
		if kind != websocket.MessageText {
			err = sandbox.Errorf(sandbox.CodeInvalid, "a message is text, not bytes")
		} else if err = decode(data, &in); err == nil {
			err = doInput(ctx, agent, id, in)
		}
		if err != nil {
			problem := wireError(err)
			if a.sendMessage(ctx, conn, rest.ExecEvent{Type: rest.ExecEventTypeError, Error: &problem}) != nil {
				return
			}
		}
	}
}

func doInput(ctx context.Context, agent *guestrpc.Client, id string, in rest.ExecInput) error {
	switch in.Type {
	case rest.ExecInputTypeStdin:
		data, err := decoded("data", in.Data, in.Encoding)
		if err != nil {
			return err
		}
		return agent.WriteStdin(ctx, id, bytes.NewReader(data), false)
	case rest.ExecInputTypeCloseStdin:
		return agent.WriteStdin(ctx, id, bytes.NewReader(nil), true)
	case rest.ExecInputTypeSignal:
		n, err := parseSignal(in.Signal)
		if err != nil {
			return err
		}
		return agent.Signal(ctx, guestrpc.SignalRequest{ID: id, Signal: n})
	case rest.ExecInputTypeResize:
		if err := checkSize(in.Rows, in.Cols); err != nil {
			return err
		}
		return agent.Resize(ctx, guestrpc.ResizeRequest{ID: id, Rows: uint16(in.Rows), Cols: uint16(in.Cols)})
	}
	return sandbox.Invalid("type", "%q is none of stdin, close_stdin, signal and resize", server.Trimmed(string(in.Type)))
}
