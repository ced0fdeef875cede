package enginetest

import (
	"bytes"
	"errors"
	"io"
	"testing"
)

// echoed sends more bytes than any buffer on the way holds, and expects them back.
func echoed(t *testing.T, conn io.ReadWriter) {
	t.Helper()
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	wrote := make(chan error, 1)
	go func() {
		_, err := conn.Write(sent)
		if half, ok := conn.(interface{ CloseWrite() error }); ok {
			err = errors.Join(err, half.CloseWrite())
		}
		wrote <- err
	}()
	got, err := io.ReadAll(conn)
	if err := errors.Join(err, <-wrote); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d of %d bytes came back, %v", len(got), len(sent), err)
	}
}
