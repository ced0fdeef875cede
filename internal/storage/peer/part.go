package peer

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"github.com/klauspost/compress/zstd"
)

const (
	// PartSize is the size of all parts but the last one of a layer.
	PartSize = 1 << 20
	// MaxContent is larger than any compressed part.
	MaxContent = PartSize + 64<<10
	// MaxLayer is the size of the largest layer that travels: the digests of its parts have
	// 8 MiB.
	MaxLayer = 256 << 30
	// MaxPage is the greatest number of digests in one answer.
	MaxPage = 16 << 10
	// MaxRead is the greatest number of parts in one request.
	MaxRead = 64
)

// Blob is a file that travels in parts: a layer, or the state.
type Blob struct {
	Digest layer.Digest
	Size   uint64
}

// Blobs are those of a snapshot, the state first.
func Blobs(m snapshot.Manifest) []Blob {
	out := []Blob{Blob(m.State)}
	for _, ref := range m.Layers() {
		if Blob(ref) != out[0] {
			out = append(out, Blob(ref))
		}
	}
	return out
}

// blobOf finds a blob of a snapshot.
func blobOf(m snapshot.Manifest, d layer.Digest) (Blob, error) {
	for _, b := range Blobs(m) {
		if b.Digest == d {
			return b, b.check()
		}
	}
	return Blob{}, fmt.Errorf("layer %s is not of that snapshot", d)
}

func (b Blob) check() error {
	if b.Size == 0 || b.Size > MaxLayer {
		return fmt.Errorf("layer %s has %d bytes, not 1 to %d", b.Digest, b.Size, uint64(MaxLayer))
	}
	return nil
}

// Parts is the number of parts of a blob.
func (b Blob) Parts() int { return int((b.Size + PartSize - 1) / PartSize) }

// part is where a part begins, and its size.
func (b Blob) part(n uint32) (offset, size uint64) {
	offset = uint64(n) * PartSize
	return offset, min(PartSize, b.Size-offset)
}

// Digests are those of a blob's parts. The zero digest stands for a part of zeros
// only.
type Digests []layer.Digest

var zeros [PartSize]byte

// digestOf is that of a part's content.
func digestOf(content []byte) layer.Digest {
	if bytes.Equal(content, zeros[:len(content)]) {
		return layer.Digest{}
	}
	return sha256.Sum256(content)
}

// ErrPart says that a part does not match its digest.
var ErrPart = errors.New("it is not what its digest says")

// The codecs are made when they are first needed, and are used concurrently.
var (
	encoder = sync.OnceValues(func() (*zstd.Encoder, error) {
		return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(PartSize), zstd.WithLowerEncoderMem(true))
	})
	decoder = sync.OnceValues(func() (*zstd.Decoder, error) {
		return zstd.NewReader(nil, zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxMemory(PartSize), zstd.WithDecoderMaxWindow(PartSize))
	})
)

// pack compresses a part for sending.
func pack(content []byte) ([]byte, error) {
	z, err := encoder()
	if err != nil {
		return nil, err
	}
	return z.EncodeAll(content, make([]byte, 0, len(content)/2)), nil
}

// unpack decompresses a part that a peer has sent, and checks its size and digest. into is
// memory for the content.
func unpack(sent []byte, size uint64, want layer.Digest, into []byte) ([]byte, error) {
	if len(sent) > MaxContent {
		return nil, fmt.Errorf("%w: it was sent in %d bytes", ErrPart, len(sent))
	}
	z, err := decoder()
	if err != nil {
		return nil, err
	}
	content, err := z.DecodeAll(sent, into[:0])
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPart, err)
	}
	if uint64(len(content)) != size {
		return nil, fmt.Errorf("%w: it has %d bytes, not %d", ErrPart, len(content), size)
	}
	if got := digestOf(content); got != want {
		return nil, fmt.Errorf("%w: %s is not %s", ErrPart, got, want)
	}
	return content, nil
}

// The file of a blob's digests: magic, the size of the blob, the digests, and the SHA-256 of
// everything before it.
const digestsMagic = "ARPARTS1"

const digestsHead = len(digestsMagic) + 8

// encode returns the file of digests.
func (d Digests) encode(b Blob) []byte {
	out := make([]byte, 0, digestsHead+(len(d)+1)*sha256.Size)
	out = append(out, digestsMagic...)
	out = binary.LittleEndian.AppendUint64(out, b.Size)
	for _, one := range d {
		out = append(out, one[:]...)
	}
	sum := sha256.Sum256(out)
	return append(out, sum[:]...)
}

// parseDigests reads the output of encode for a blob, and rejects anything
// else.
func parseDigests(file []byte, b Blob) (Digests, error) {
	if want := digestsHead + (b.Parts()+1)*sha256.Size; len(file) != want {
		return nil, fmt.Errorf("digests of parts: %d bytes, not %d", len(file), want)
	}
	body, sum := file[:len(file)-sha256.Size], file[len(file)-sha256.Size:]
	if got := sha256.Sum256(body); !bytes.Equal(got[:], sum) {
		return nil, errors.New("digests of parts: damaged")
	}
	if string(body[:len(digestsMagic)]) != digestsMagic || binary.LittleEndian.Uint64(body[len(digestsMagic):]) != b.Size {
		return nil, errors.New("digests of parts: of another version, or of another layer")
	}
	return ParsePage(body[digestsHead:])
}

// Page encodes digests for sending, 32 bytes each.
func (d Digests) Page() []byte {
	out := make([]byte, 0, len(d)*sha256.Size)
	for _, one := range d {
		out = append(out, one[:]...)
	}
	return out
}

// ParsePage reads digests that a peer has sent.
func ParsePage(page []byte) (Digests, error) {
	if len(page)%sha256.Size != 0 || len(page)/sha256.Size > MaxLayer/PartSize {
		return nil, fmt.Errorf("%d bytes are no digests of parts", len(page))
	}
	out := make(Digests, 0, len(page)/sha256.Size)
	for ; len(page) > 0; page = page[sha256.Size:] {
		out = append(out, layer.Digest(page[:sha256.Size]))
	}
	return out, nil
}
