package netctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// ErrBroken says that the connection to a netd has ended. The request may have been
// carried out or not. To go on, the caller dials again and calls List.
var ErrBroken = errors.New("the connection to netd is broken")

// ErrRefused says that a netd refuses this daemon, or the daemon refuses the netd.
var ErrRefused = errors.New("netd and daemon do not fit")

// usualPatience is how long a request may take if its ctx has no deadline.
const usualPatience = 30 * time.Second

// Client speaks with one netd. Its methods are safe for concurrent use.
type Client struct {
	conn    *Conn
	welcome Welcome
	ended   chan struct{} // closed when the connection has ended

	mu      sync.Mutex // protects all following fields
	last    uint64     // id of the newest request
	waiting map[uint64]chan<- *Reply
	broken  error // why the connection has ended
}

// Dial connects to the netd that listens at path.
func Dial(ctx context.Context, path string) (*Client, error) {
	ctx, cancel := withDeadline(ctx)
	defer cancel()
	conn, err := dial(ctx, path)
	if err != nil {
		return nil, err
	}
	c := &Client{conn: conn, ended: make(chan struct{}), waiting: map[uint64]chan<- *Reply{}}
	if err := c.hello(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("speak to netd at %s: %w", path, err), conn.Close())
	}
	go c.receive()
	return c, nil
}

func (c *Client) hello(ctx context.Context) error {
	deadline, _ := ctx.Deadline() // withDeadline has set it
	stop := context.AfterFunc(ctx, func() { _ = c.conn.socket.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	// A netd that refuses the daemon may have closed the connection already. Its
	// reason can still be read.
	sendErr := c.conn.Send(deadline, &Hello{Protocol: Protocol, Features: Features}, nil)
	m, err := c.receiveOne(deadline)
	if err != nil {
		return errors.Join(sendErr, err)
	}
	w, ok := m.(*Welcome)
	switch {
	case !ok:
		return fmt.Errorf("%w: it answered with a message of kind %d", ErrRefused, m.kind())
	case w.Protocol != Protocol:
		return fmt.Errorf("%w: it speaks protocol %d, this daemon %d: end it, and start one of this version", ErrRefused, w.Protocol, Protocol)
	case w.Refused != "":
		return fmt.Errorf("%w: %s", ErrRefused, w.Refused)
	}
	c.welcome = *w
	return sendErr
}

// Welcome is the netd's description of itself. A netd may have been taken over, and
// lie.
func (c *Client) Welcome() Welcome { return c.welcome }

// Done is closed when the connection has ended, for any reason.
func (c *Client) Done() <-chan struct{} { return c.ended }

// Close ends the connection; the netd goes on. Waiting requests fail.
func (c *Client) Close() error {
	err := c.conn.Close()
	<-c.ended
	if errors.Is(err, net.ErrClosed) {
		return nil // the netd has ended it before
	}
	return err
}

// receive hands replies to the waiting requests.
func (c *Client) receive() {
	err := c.receiveAll()
	_ = c.conn.Close() // the connection is of no use any more
	c.mu.Lock()
	c.broken = fmt.Errorf("%w: %w", ErrBroken, err)
	waiting := c.waiting
	c.waiting = nil
	c.mu.Unlock()
	for _, reply := range waiting {
		close(reply)
	}
	close(c.ended)
}

func (c *Client) receiveAll() error {
	for {
		m, err := c.receiveOne(time.Time{})
		if errors.Is(err, io.EOF) {
			return errors.New("netd has ended, or has hung up")
		}
		if err != nil {
			return err
		}
		r, ok := m.(*Reply)
		if !ok {
			return fmt.Errorf("netd sent a message of kind %d, which is no reply", m.kind())
		}
		c.mu.Lock()
		reply := c.waiting[r.ID]
		delete(c.waiting, r.ID)
		asked := r.ID > 0 && r.ID <= c.last
		c.mu.Unlock()
		if !asked {
			return fmt.Errorf("netd answered request %d, which nobody has made", r.ID)
		}
		if reply != nil { // otherwise no request waits for it any more
			reply <- r
		}
	}
}

// receiveOne receives a message. A netd must not send descriptors.
func (c *Client) receiveOne(deadline time.Time) (Message, error) {
	m, file, err := c.conn.Receive(deadline)
	if file != nil {
		return nil, errors.Join(errors.New("netd sent a descriptor"), file.Close())
	}
	return m, err
}

// call sends a request, which it makes with a new id, and waits for the reply. Its
// data is decoded into result, unless that is nil.
func (c *Client) call(ctx context.Context, what string, request func(id uint64) Request, file *os.File, result Result) error {
	ctx, cancel := withDeadline(ctx)
	defer cancel()
	id, reply, err := c.enlist()
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	deadline, _ := ctx.Deadline() // withDeadline has set it
	if err := c.conn.Send(deadline, request(id), file); err != nil {
		c.forget(id)
		if errors.Is(err, ErrInvalid) || errors.Is(err, errUnsent) {
			return fmt.Errorf("%s: %w", what, err) // nothing was sent
		}
		_ = c.conn.Close() // a part of the message may have been sent
		return fmt.Errorf("%s: %w: %w", what, ErrBroken, err)
	}
	select {
	case r, ok := <-reply:
		if !ok {
			c.mu.Lock()
			defer c.mu.Unlock()
			return fmt.Errorf("%s: %w", what, c.broken)
		}
		err := r.Err()
		if err == nil && result != nil {
			err = UnmarshalResult(r.Data, result)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	case <-ctx.Done():
		c.forget(id)
		return fmt.Errorf("%s: netd has not answered: %w", what, ctx.Err())
	}
}

// enlist returns a new id and the channel of its reply. The channel is closed if no
// reply will come.
func (c *Client) enlist() (uint64, <-chan *Reply, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken != nil {
		return 0, nil, c.broken
	}
	c.last++
	reply := make(chan *Reply, 1)
	c.waiting[c.last] = reply
	return c.last, reply, nil
}

func (c *Client) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, id)
}

func withDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, usualPatience)
}
