package sandbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net"
	"path"
	"strconv"
	"strings"
)

// Offer is a template's snapshot, but for its content, as a controller carries it from the
// node that has built it to a node that fetches it.
type Offer struct {
	Revision string
	Stage    Stage
	// Digest is the snapshot's digest, which is that of Manifest. Manifest is
	// manifest.json, byte for byte.
	Digest   string
	Manifest []byte
	// Built is the result of the build, as JSON.
	Built []byte
}

// Bounds of a FetchRequest.
const (
	maxOffered = 1 << 20 // of Manifest and of Built
	maxPeers   = 16
	maxAddress = 260
	maxPack    = 1024
)

// EncodeBuilt encodes the result of a build for an offer. It leaves out Pulled, which concerns
// only the node that built.
func EncodeBuilt(b Built) ([]byte, error) {
	b.Pulled = 0
	return json.Marshal(b)
}

// ParseBuilt reads the text of EncodeBuilt. It comes from another node and is
// not trusted.
func ParseBuilt(text []byte) (b Built, err error) {
	invalid := func(format string, a ...any) (Built, error) {
		return Built{}, Invalid("offer.built", format, a...)
	}
	if len(text) > maxOffered {
		return invalid("it has more than %d bytes", maxOffered)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields() // another version may mean more
	if err := d.Decode(&b); err != nil {
		return invalid("it is damaged, or of another version of AgentRun: %v", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return invalid("something follows its end")
	}
	spec := TemplateSpec{Image: "x", MilliCPUs: DefaultMilliCPUs, Memory: DefaultMemory, Env: b.Env, Workdir: b.Workdir, User: b.User}
	if err := spec.Validate(); err != nil {
		return invalid("%v", err)
	}
	for _, s := range []string{b.Image, b.Workdir, b.User, b.TrustedCA} {
		if strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return invalid("%s has a control character", Quote(s))
		}
	}
	switch {
	case !path.IsAbs(b.Workdir):
		return invalid("its working folder %s is not absolute", Quote(b.Workdir))
	case b.Image == "" || len(b.Image) > maxAddress:
		return invalid("it does not say of which image it is made")
	case b.Pulled != 0:
		return invalid("pulled is of the node that built")
	}
	return b, nil
}

// PeerAddress is the address of a node that is asked for a snapshot.
type PeerAddress struct {
	// Address is HOST:PORT. Node is the name that its certificate must have.
	Address string `json:"address"`
	Node    string `json:"node"`
}

// FetchRequest asks a node to fetch a template's snapshot, and not to build it.
type FetchRequest struct {
	Key
	Spec  TemplateSpec
	Owner UID
	Offer Offer
	// Peers are asked all at once.
	Peers []PeerAddress
	// Pack names a pack in an OCI registry that has the snapshot: REGISTRY/NAME:TAG. It
	// is used for parts that the peers do not have. If it is empty, only peers are used.
	Pack string
}

// Validate refuses a request that no node can serve. Code that knows the form of the offer
// checks its content.
func (r FetchRequest) Validate() error {
	switch o := r.Offer; {
	case len(r.Peers) == 0 && r.Pack == "":
		return Invalid("peers", "name nodes that have the snapshot, or a pack in a registry")
	case len(r.Peers) > maxPeers:
		return Invalid("peers", "%d are more than %d", len(r.Peers), maxPeers)
	case len(r.Pack) > maxPack:
		return Invalid("pack", "it is longer than %d bytes", maxPack)
	case len(o.Manifest) == 0 || len(o.Manifest) > maxOffered:
		return Invalid("offer.manifest", "%d bytes are not 1 to %d", len(o.Manifest), maxOffered)
	case o.Stage != AfterInit && o.Stage != AfterReady:
		return Invalid("offer.stage", "it is missing")
	}
	for _, p := range r.Peers {
		_, port, err := net.SplitHostPort(p.Address)
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		if err != nil || len(p.Address) > maxAddress {
			return Invalid("peers.address", "%s is not HOST:PORT", Quote(p.Address))
		}
		if p.Node == "" || len(p.Node) > maxAddress {
			return Invalid("peers.node", "the name in the certificate of %s is missing, or too long", Quote(p.Address))
		}
	}
	return r.Spec.Validate()
}

// FetchOrder is the rest of the work for a build whose snapshot is fetched.
type FetchOrder struct {
	// Digest is the snapshot's digest. Its manifest is in a file.
	Digest string        `json:"digest"`
	Built  []byte        `json:"built"`
	Peers  []PeerAddress `json:"peers,omitempty"`
	Pack   string        `json:"pack,omitempty"`
}

// SnapshotRead names parts of a layer of a template's snapshot, by digests in hexadecimal.
type SnapshotRead struct {
	Snapshot, Layer string
	Parts           []uint32
}
