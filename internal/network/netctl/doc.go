// Package netctl is the language between the daemon and a netd, the process that is
// the network of one namespace's sandboxes, and the daemon's side of it.
//
// A netd listens on a unix stream socket. Whoever connects says Hello and is answered
// with a Welcome, by which both know which protocol and which features the other has.
// From then on it sends requests with ids of its choosing, and each is answered with a
// Reply of the same id, in any order. A netd outlives its parents: it goes on serving
// its wires while nobody is connected, and tells the next one what it has (List).
//
// On the socket, each message is its size (four bytes, little endian), one byte of
// kind, and a message of package codec. A descriptor travels with the first byte of its
// message. Only Attach has one, the host's end of a wire. Whoever breaks any of this is
// hung up on.
package netctl
