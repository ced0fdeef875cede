package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"

	"github.com/coder/websocket"

	"agentrun.dev/api/rest"
)

// maxMessage is the daemon's limit for a message, in both directions.
const maxMessage = 1 << 20

// tunnelBuffer is the size of one read from a connection.
const tunnelBuffer = 64 << 10

// halfCloser is a connection whose two directions end separately.
type halfCloser interface{ CloseWrite() error }

// Tunnel connects conn with a TCP port of a sandbox, until both sides have
// ended, one has failed, or ctx ends. It does not close conn.
func (c *Client) Tunnel(ctx context.Context, sandbox string, port uint16, conn net.Conn) error {
	header := http.Header{}
	if c.key != "" {
		header.Set("Authorization", "Bearer "+c.key)
	}
	ws, res, err := websocket.Dial(ctx, c.base+c.object("sandboxes", sandbox, "tunnels", strconv.Itoa(int(port))),
		&websocket.DialOptions{HTTPClient: c.http, HTTPHeader: header})
	if err != nil {
		if res != nil && res.StatusCode >= http.StatusBadRequest {
			return problem(res)
		}
		return fmt.Errorf("speak to the daemon: %w", err)
	}
	defer func() { _ = ws.CloseNow() }()
	ws.SetReadLimit(maxMessage)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // unblocks reads and writes of conn
	defer stop()
	sent := make(chan error, 1)
	go func() {
		err := sendAll(ctx, ws, conn)
		if err != nil {
			cancel()
		}
		sent <- err
	}()
	err = receiveAll(ctx, ws, conn)
	if err != nil {
		cancel()
		<-sent
		return err
	}
	if err := <-sent; err != nil {
		return err
	}
	_ = ws.Close(websocket.StatusNormalClosure, "") // the daemon may have closed it already
	return nil
}

func sendAll(ctx context.Context, ws *websocket.Conn, from io.Reader) error {
	buf := make([]byte, tunnelBuffer)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if err := ws.Write(ctx, websocket.MessageBinary, buf[:n]); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			end, err := json.Marshal(rest.TunnelEvent{Type: rest.TunnelEventTypeEnd})
			if err != nil {
				return err
			}
			return ws.Write(ctx, websocket.MessageText, end)
		}
		if err != nil {
			return err
		}
	}
}

func receiveAll(ctx context.Context, ws *websocket.Conn, to io.Writer) error {
	for {
		kind, data, err := ws.Read(ctx)
		if err != nil {
			return err
		}
		if kind == websocket.MessageText { // the only kind of text message
			if half, ok := to.(halfCloser); ok {
				return half.CloseWrite()
			}
			return nil
		}
		if _, err := to.Write(data); err != nil {
			return err
		}
	}
}
