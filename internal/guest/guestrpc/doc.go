// Package guestrpc is the protocol between a host and the agent in its guest. It runs
// over one reliable byte stream: vsock in production, a socket pair in tests. The
// host is the client and opens streams; the agent serves them. Neither end trusts the
// other. No message of a peer makes the other end panic, and its memory and its
// number of goroutines stay bounded.
//
// # Handshake
//
// Each end sends one hello: the magic "AGRUNRPC", a little-endian uint16 length of at
// most 4096, and a message with the lowest and highest protocol version it speaks,
// the largest frame payload it accepts, the initial window of every channel it
// receives on, and a list of capability names. The client sends first. Both use the
// highest version they share; if they share no version, both close, with an error
// that names both ranges.
//
// # Frames
//
// After the hellos come frames: a header of 12 bytes and a payload of at most 64 KiB
// (or less, if the receiver said so in its hello).
//
//	offset  size  field
//	0       1     type
//	1       1     flags, none are defined: 0
//	2       1     channel: 0 stdin, 1 stdout, 2 stderr, 3 control; 0 where unused
//	3       1     0
//	4       4     stream, little endian; 0 for PING, PONG and GOAWAY
//	8       4     payload length, little endian
//
//	type       from    payload                      meaning
//	1 OPEN     client  uvarint method, request      begins a stream; ids are odd and increase
//	2 HEADERS  server  message                      a streaming call was accepted; data follows
//	3 REPLY    server  message                      the result; ends the stream
//	4 DATA     both    bytes                        uses up the window of its channel
//	5 WINDOW   both    uint32, little endian        the receiver takes that many bytes more on the channel
//	6 EOF      both    none                         no more DATA on the channel
//	7 RESET    both    code, message                ends the stream: failed (server) or cancelled (client)
//	8 PING     both    8 bytes                      answered with a PONG of the same bytes
//	9 PONG     both    8 bytes
//	10 GOAWAY  both    code, message                no new streams; after a violation the sender closes
//
// A unary call is OPEN, REPLY. A streaming call is OPEN, HEADERS, any number of DATA,
// WINDOW and EOF, REPLY. A failed call ends with RESET in place of REPLY. The server
// forgets a stream once it has sent REPLY or RESET, the client once it has received
// one or has sent RESET; frames of a forgotten stream that were still under way are
// dropped. A frame that a correct peer cannot send (an unknown type, a stream id used
// twice, DATA beyond the window or after EOF, an oversize frame) ends the session
// with a [ProtocolError].
//
// # Flow control
//
// Each channel of each stream has its own window: the bytes its sender may still
// send. DATA uses it up; the receiver returns it with WINDOW as its consumer reads,
// half a window at a time. The bytes received and not yet read are at most one
// window. So the read loop can always store a frame and never waits for a consumer: a
// stalled stream holds one window of memory and delays no other stream. Only channels
// that the method uses in that direction may carry data (the agent receives on stdin
// only), and the server runs at most [MaxStreams] calls at a time, counted until the
// handler has returned, so that resetting and opening again does not get around the
// limit.
//
// # Writing, and why it can not deadlock or grow
//
// There is no writer goroutine. A goroutine that has a frame takes the write turn and
// writes the frame, in one system call when the socket has room.
//
// The danger is a read loop that waits to write: two such read loops would wait for
// each other forever. So frames that come from a read loop (PONG, the RESET that
// refuses a stream) and frames that no caller waits for (WINDOW, the RESET that
// cancels) go through a pending queue: they are appended to it, then written without
// blocking if the turn is free; if it is not, its holder writes them before it gives
// the turn back. If the socket is full a goroutine is started that keeps the turn and
// waits for room; there is never more than one, as it holds the turn. So a read loop
// never waits for a write, hence it always reads, hence the peer's writes always make
// progress.
//
// The queue is bounded by the frames that a correct peer can cause: two WINDOW frames
// for each channel and one RESET for each stream, plus one PONG for each of its
// unanswered PINGs. If it would exceed 64 KiB, the peer sends requests and does not
// read the answers, and the session is closed.
//
// A caller with a context never waits inside a system call either. The part of its
// frame that the socket did not take goes to that same goroutine, one frame at most.
//
// # Cost in the guest
//
// Every fork pays again for the memory that the agent touches. An idle session is one
// goroutine in the read loop and a 4 KiB buffer; a larger buffer exists only while
// large frames arrive. There are no timers and no keepalives, a ping is answered by
// the read loop with one write and no allocation, and nothing here uses reflection,
// net, fmt or encoding/json.
package guestrpc
