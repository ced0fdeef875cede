package rest

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"

	"github.com/coder/websocket"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// ConnectPort implements rest.ServerInterface.
func (a *api) ConnectPort(w http.ResponseWriter, r *http.Request, namespace, name, portText string) {
	port, err := parsePort(portText)
	u := a.session(w, r, namespace, name, err)
	if u == nil {
		return
	}
	defer u.Close()
	ctx, end := u.Begin(r.Context(), sandbox.OpPort)
	inside, err := u.Connect(ctx, port)
	defer func() { end(err) }()
	if err != nil {
		a.fail(w, r, err)
		return
	}
	defer func() { _ = inside.Close() }() // never fails
	// Accept itself rejects requests that are not WebSocket handshakes, and
	// those from pages of other sites.
	conn, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	defer func() { _ = conn.CloseNow() }()
	conn.SetReadLimit(maxMessage)
	if err = a.tunnel(ctx, conn, inside); err != nil {
		_ = conn.Close(websocket.StatusInternalError, server.Trimmed(err.Error()))
		return
	}
	_ = conn.Close(websocket.StatusNormalClosure, "")
}

// tunnel moves bytes both ways until both sides have ended, or one has failed.
func (a *api) tunnel(ctx context.Context, conn *websocket.Conn, inside sandbox.Conn) error {
	both, cancel := context.WithCancel(ctx)
	defer cancel()
	out := make(chan error, 1)
	go func() {
		err := a.tunnelOut(both, conn, inside)
		if err != nil {
			cancel() // ends the other direction
		}
		out <- err
	}()
	err := tunnelIn(both, conn, inside)
	if err != nil {
		_ = inside.Close() // never fails
		return errors.Join(<-out, err)
	}
	// A client that sends no more may still leave. CloseRead gets ctx and not
	// both: a read whose context ends closes the connection at once, and the
	// client is to get a close message.
	left := conn.CloseRead(ctx)
	stop := context.AfterFunc(left, func() { _ = inside.Close() })
	defer stop()
	return <-out
}

// tunnelOut sends the program's output to the client.
func (a *api) tunnelOut(ctx context.Context, conn *websocket.Conn, inside io.Reader) error {
	send := func(kind websocket.MessageType, p []byte) error {
		ctx, cancel := context.WithTimeout(ctx, a.StallTimeout)
		defer cancel()
		return conn.Write(ctx, kind, p)
	}
	buf := make([]byte, guestrpc.MaxPayload)
	for {
		n, err := inside.Read(buf)
		if n > 0 {
			if err := send(websocket.MessageBinary, buf[:n]); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			end, err := json.Marshal(rest.TunnelEvent{Type: rest.TunnelEventTypeEnd})
			if err != nil {
				return err
			}
			return send(websocket.MessageText, end)
		}
		if err != nil {
			return err
		}
	}
}

// tunnelIn sends the client's messages to the program.
func tunnelIn(ctx context.Context, conn *websocket.Conn, inside sandbox.Conn) error {
	for {
		kind, data, err := conn.Read(ctx)
		if err != nil {
			return err
		}
		if kind == websocket.MessageBinary {
			if _, err := inside.Write(data); err != nil {
				return err
			}
			continue
		}
		var event rest.TunnelEvent
		if err := decode(data, &event); err != nil {
			return err
		}
		if event.Type != rest.TunnelEventTypeEnd {
			return sandbox.Invalid("type", "%q is not end", server.Trimmed(string(event.Type)))
		}
		return inside.CloseWrite()
	}
}
