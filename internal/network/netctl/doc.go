// Package netctl is the protocol between the daemon and a netd, the process that is
// the network of one namespace's sandboxes. It also holds the daemon's side of that
// protocol.
//
// A netd listens on a unix stream socket. A client that connects sends Hello and gets
// a Welcome, so that both know the other's protocol and features. From then on it
// sends requests with ids of its choosing. Each is answered with a Reply of the same
// id, in any order. A netd outlives its parents: it goes on serving its wires while
// no parent is connected, and reports its wires to the next one (List).
//
// On the socket, each message is its size (four bytes, little endian), one byte of
// kind, and a message of package codec. A descriptor travels with the first byte of
// its message. Only Attach has one, the host's end of a wire. If a peer violates any
// of this, the connection is closed.
package netctl
