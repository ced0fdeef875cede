package pack

import (
	"archive/tar"
	"bytes"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
)

func squeeze(t testing.TB, b []byte, o ...zstd.EOption) []byte {
	t.Helper()
	z, err := zstd.NewWriter(nil, o...)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = z.Close() }() // into memory
	return z.EncodeAll(b, nil)
}

// repack gives a part other content, with annotations that fit it.
func (b *bundle) repack(d *v1.Descriptor, content []byte) {
	b.replace(d, squeeze(b.t, content))
	d.Annotations[sizeKey] = strconv.Itoa(len(content))
	d.Annotations[digestKey] = describe(content).Digest.String()
}

// config changes the snapshot's manifest. Its checksum is made valid again if
// possible.
func (b *bundle) config(edit func(*snapshot.Manifest)) {
	b.manifest(func(m *v1.Manifest) {
		s, err := snapshot.ParseManifest(b.find(blobName(m.Config)).content)
		if err != nil {
			b.t.Fatal(err)
		}
		edit(&s)
		raw, err := s.Encode()
		if err != nil {
			b.t.Fatal(err)
		}
		b.replace(&m.Config, raw)
	})
}

// hostile are packs that must be refused, and the words of the error. Those
// whose names begin with "file:" are wrong in something that only a file has,
// not a registry. The small snapshot has three parts: state, memory (16 pages),
// disk (4 pages).
var hostile = []struct {
	name string
	edit func(*bundle)
	say  string
}{
	// Entries of the archive.
	{"file: no index", func(b *bundle) { b.remove(indexName) }, "index.json is missing"},
	{"file: no layout", func(b *bundle) { b.remove(layoutName) }, "oci-layout is missing"},
	{"file: another layout", func(b *bundle) { b.find(layoutName).content = []byte(`{"imageLayoutVersion":"2.0.0"}`) }, `version "2.0.0"`},
	{"file: layout that is no JSON", func(b *bundle) { b.find(layoutName).content = []byte("x") }, "oci-layout"},
	{"file: huge layout", func(b *bundle) { b.find(layoutName).content = make([]byte, 2<<10) }, "more than 1024"},
	{"file: huge index", func(b *bundle) { b.find(indexName).content = make([]byte, 2<<20) }, "more than 1048576"},
	{"file: a name with ..", func(b *bundle) { b.add("../evil", nil) }, `"../evil"`},
	{"file: an absolute name", func(b *bundle) { b.add("/etc/passwd", nil) }, `"/etc/passwd"`},
	{"file: a blob with ..", func(b *bundle) { b.add(blobPrefix+"../../x", nil) }, "which no packed snapshot has"},
	{"file: a blob in upper case", func(b *bundle) { b.add(blobPrefix+strings.Repeat("A", 64), nil) }, "which no packed snapshot has"},
	{"file: a blob of another kind", func(b *bundle) { b.add("blobs/sha512/"+strings.Repeat("a", 64), nil) }, "which no packed snapshot has"},
	{"file: a file of ours", func(b *bundle) { b.add("manifest.json", nil) }, `"manifest.json"`},
	{"file: a symbolic link", func(b *bundle) {
		b.files = append(b.files, file{tar.Header{Typeflag: tar.TypeSymlink, Name: blobPrefix + strings.Repeat("a", 64), Linkname: "/etc/passwd"}, nil})
	}, "is no plain file"},
	{"file: a hard link", func(b *bundle) {
		b.files = append(b.files, file{tar.Header{Typeflag: tar.TypeLink, Name: blobPrefix + strings.Repeat("a", 64), Linkname: indexName}, nil})
	}, "is no plain file"},
	{"file: a device", func(b *bundle) {
		b.files = append(b.files, file{tar.Header{Typeflag: tar.TypeChar, Name: blobPrefix + strings.Repeat("a", 64), Devmajor: 1}, nil})
	}, "is no plain file"},
	{"file: a folder", func(b *bundle) {
		b.files = append(b.files, file{tar.Header{Typeflag: tar.TypeDir, Name: "etc/"}, nil})
	}, `"etc/"`},
	{"file: an entry twice", func(b *bundle) { b.add(indexName, b.find(indexName).content) }, "comes twice"},
	{"file: a blob twice", func(b *bundle) { b.files = append(b.files, b.files[1]) }, "comes twice"},
	{"file: a blob of nothing", func(b *bundle) { b.addBlob([]byte("extra")) }, "belongs to nothing"},
	{"file: too many entries", func(b *bundle) {
		for i := range maxEntries {
			b.add(blobPrefix+fmt.Sprintf("%064x", i), nil)
		}
	}, "more than 8448 entries"},
	{"file: two snapshots", func(b *bundle) {
		b.index(func(i *v1.IndexManifest) { i.Manifests = append(i.Manifests, i.Manifests[0]) })
	}, "names 2 snapshots"},
	{"file: no snapshot", func(b *bundle) { b.index(func(i *v1.IndexManifest) { i.Manifests = nil }) }, "names 0 snapshots"},
	{"file: an index that is no JSON", func(b *bundle) { b.find(indexName).content = []byte("{") }, "index.json: damaged"},
	{"file: an index with more behind it", func(b *bundle) {
		b.find(indexName).content = append(b.find(indexName).content, "{}"...)
	}, "something follows"},
	{"file: an index of indexes", func(b *bundle) {
		b.index(func(i *v1.IndexManifest) { i.Manifests[0].MediaType = types.OCIImageIndex })
	}, "it is of type"},
	{"file: a huge manifest", func(b *bundle) {
		b.index(func(i *v1.IndexManifest) { i.Manifests[0].Size = 1 << 40 })
	}, "not 1 to 4194304"},
	{"file: a manifest of another size", func(b *bundle) {
		b.index(func(i *v1.IndexManifest) { i.Manifests[0].Size-- })
	}, "the manifest says"},
	{"file: traversal in a digest", func(b *bundle) {
		b.find(indexName).content = bytes.Replace(b.find(indexName).content, []byte(`"sha256:`), []byte(`"sha256:../`), 1)
	}, "damaged"},
	{"file: a manifest that is missing", func(b *bundle) {
		b.index(func(i *v1.IndexManifest) { i.Manifests[0].Digest.Hex = strings.Repeat("a", 64) })
	}, "is missing"},

	// The manifest.
	{"another version", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { m.ArtifactType = "application/vnd.agentrun.snapshot.v2" })
	}, "another version"},
	{"no artifact type", func(b *bundle) { b.manifest(func(m *v1.Manifest) { m.ArtifactType = "" }) }, "another version"},
	{"another artifact", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { m.ArtifactType = "application/vnd.cncf.helm" })
	}, "no packed snapshot"},
	{"an image", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { m.ArtifactType, m.Config.MediaType = "", types.OCIConfigJSON })
	}, "it is an image"},
	{"another schema", func(b *bundle) { b.manifest(func(m *v1.Manifest) { m.SchemaVersion = 1 }) }, "version 1"},
	{"a subject", func(b *bundle) { b.manifest(func(m *v1.Manifest) { m.Subject = &m.Config }) }, "without a subject"},
	{"an unknown field", func(b *bundle) { b.raw(`{"schemaVersion":2`, `{"path":"/etc","schemaVersion":2`) }, "unknown field"},
	{"a negative size", func(b *bundle) { b.raw(`"size":`, `"size":-`) }, "not 1 to"},
	{"no parts", func(b *bundle) { b.manifest(func(m *v1.Manifest) { m.Layers = nil }) }, "0 parts"},
	{"too many parts", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) {
			for len(m.Layers) <= maxParts {
				m.Layers = append(m.Layers, v1.Descriptor{Digest: m.Config.Digest})
			}
		})
	}, "8193 parts"},
	{"config: annotations", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { m.Config.Annotations = map[string]string{"a": "b"} })
	}, "config: it has annotations"},
	{"config: huge", func(b *bundle) { b.manifest(func(m *v1.Manifest) { m.Config.Size = 1 << 30 }) }, "config: it has 1073741824 bytes"},
	{"config: another type", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { m.Config.MediaType = "application/json" })
	}, "config: it is of type"},
	{"config: data beside it", func(b *bundle) { b.manifest(func(m *v1.Manifest) { m.Config.Data = []byte("x") }) }, "config: it has URLs, data"},

	// Parts: their descriptors.
	{"a part elsewhere", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { m.Layers[1].URLs = []string{"http://169.254.169.254/"} })
	}, "it has URLs"},
	{"a part of another type", func(b *bundle) { b.manifest(func(m *v1.Manifest) { m.Layers[1].MediaType = types.OCILayerZStd }) }, "part 2 of 3: it is of type"},
	{"two states", func(b *bundle) { b.manifest(func(m *v1.Manifest) { m.Layers[1] = m.Layers[0] }) }, "the state comes first and once"},
	{"the state is not first", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { m.Layers[0], m.Layers[1] = m.Layers[1], m.Layers[0] })
	}, "the state comes first"},
	{"the state is missing", func(b *bundle) { b.manifest(func(m *v1.Manifest) { m.Layers = m.Layers[1:] }) }, "the state comes first"},
	{"a huge part", func(b *bundle) { b.manifest(func(m *v1.Manifest) { m.Layers[1].Size = 1 << 40 }) }, "part 2 of 3: it has 1099511627776 bytes"},
	{"an empty part", func(b *bundle) { b.manifest(func(m *v1.Manifest) { m.Layers[1].Size = 0 }) }, "part 2 of 3: it has 0 bytes"},
	{"a part without a digest", func(b *bundle) { b.annotate(digestKey, "") }, "does not begin with sha256:"},
	{"traversal in a digest", func(b *bundle) { b.annotate(digestKey, "sha256:../../../etc/passwd") }, digestKey},
	{"traversal in a layer", func(b *bundle) { b.annotate(layerKey, "../../../../etc/cron.d/x") }, layerKey},
	{"a layer in upper case", func(b *bundle) { b.annotate(layerKey, "sha256:"+strings.Repeat("A", 64)) }, layerKey},
	{"a part with one annotation less", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { delete(m.Layers[1].Annotations, sizeKey) })
	}, sizeKey + " is missing"},
	{"a part with one annotation more", func(b *bundle) { b.annotate("org.opencontainers.image.title", "../x") }, "5 annotations"},
	{"a size with a sign", func(b *bundle) { b.annotate(sizeKey, "+4096") }, "is no number"},
	{"a size in another form", func(b *bundle) { b.annotate(sizeKey, "04096") }, "is no number"},
	{"a size that overflows", func(b *bundle) { b.annotate(sizeKey, "18446744073709551616") }, "is no number"},
	{"a part larger than parts are", func(b *bundle) { b.annotate(sizeKey, strconv.Itoa(PartSize+page)) }, "not 1 to"},
	{"a part of half a page", func(b *bundle) { b.annotate(sizeKey, "100") }, "whole pages"},
	{"a part between pages", func(b *bundle) { b.annotate(offsetKey, "100") }, "whole pages"},
	{"a part beyond its layer", func(b *bundle) { b.annotate(offsetKey, strconv.Itoa(16*page)) }, "the layer at 65536"},
	{"a part far beyond", func(b *bundle) { b.annotate(offsetKey, "9223372036854775807") }, "whole pages"},
	{"a huge state", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { m.Layers[0].Annotations[sizeKey] = strconv.Itoa(snapshot.MaxState + 1) })
	}, "the state has"},
	{"a part twice", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { m.Layers = append(m.Layers[:2], m.Layers[1:]...) })
	}, "the one before ends at"},
	{"a part of nothing", func(b *bundle) { b.annotate(layerKey, "sha256:"+strings.Repeat("0", 64)) }, "not of this snapshot"},
	{"parts in another order", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { m.Layers[1], m.Layers[2] = m.Layers[2], m.Layers[1] })
	}, "not where it belongs"},
	{"a part that is missing", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) {
			b.remove(blobName(m.Layers[1]))
			m.Layers = append(m.Layers[:1], m.Layers[2:]...)
		})
	}, "is damaged: its digest"},

	// Parts: their content.
	{"a blob of another size", func(b *bundle) { b.manifest(func(m *v1.Manifest) { m.Layers[1].Size++ }) }, ""},
	{"a part that is no zstd", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { b.replace(&m.Layers[1], []byte("no zstd")) })
	}, "decompress"},
	{"a part that goes on", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { b.replace(&m.Layers[1], squeeze(b.t, make([]byte, 17*page))) })
	}, "other than 65536 bytes"},
	{"a part that ends early", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { b.replace(&m.Layers[1], squeeze(b.t, make([]byte, 15*page))) })
	}, "other than 65536 bytes"},
	{"a bomb", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { b.replace(&m.Layers[1], squeeze(b.t, make([]byte, 256<<20))) })
	}, "other than 65536 bytes"},
	{"a window that is too large", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) {
			b.replace(&m.Layers[1], stream(b.t, make([]byte, 40<<20), zstd.WithWindowSize(32<<20)))
		})
	}, "window size exceeded"},
	{"other content", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { b.replace(&m.Layers[1], squeeze(b.t, make([]byte, 16*page))) })
	}, "its content has digest"},
	{"another layer", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { b.repack(&m.Layers[1], make([]byte, 16*page)) })
	}, "is damaged: its digest"},
	{"another state", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { b.repack(&m.Layers[0], []byte("something else")) })
	}, "the state has"},

	// The snapshot's manifest.
	{"a configuration that is none", func(b *bundle) {
		b.manifest(func(m *v1.Manifest) { b.replace(&m.Config, []byte("{}")) })
	}, "the snapshot's manifest: format: 0"},
	{"another format", func(b *bundle) { b.configRaw(`"format":1`, `"format":9`) }, "format: 9"},
	{"another engine", func(b *bundle) { b.configRaw(`"microvm/1"`, `"docker/7"`) }, `engine: "docker/7"`},
	{"a checksum that is wrong", func(b *bundle) { b.configRaw(`"vcpus":1`, `"vcpus":2`) }, "checksum is wrong"},
	{"a manifest in another form", func(b *bundle) { b.configRaw(`"vcpus":1`, `"vcpus": 1`) }, "canonical"},
	{"more than is allowed", func(b *bundle) {
		b.config(func(m *snapshot.Manifest) {
			big := snapshot.Blob{Digest: layer.Digest{9}, Size: 65 << 30}
			m.Memory = whole(layer.Ref(big))
		})
	}, "not of this snapshot"},
}

func (b *bundle) index(edit func(*v1.IndexManifest)) {
	i := decode[v1.IndexManifest](b.t, b.find(indexName).content)
	edit(&i)
	b.find(indexName).content = encode(b.t, i)
}

// raw changes the bytes of the manifest.
func (b *bundle) raw(from, to string) {
	index := decode[v1.IndexManifest](b.t, b.find(indexName).content)
	raw := b.find(blobName(index.Manifests[0])).content
	b.replaceManifest(&index, swap(b.t, raw, from, to))
}

func (b *bundle) configRaw(from, to string) {
	b.manifest(func(m *v1.Manifest) {
		b.replace(&m.Config, swap(b.t, b.find(blobName(m.Config)).content, from, to))
	})
}

func swap(t testing.TB, raw []byte, from, to string) []byte {
	t.Helper()
	out := bytes.Replace(raw, []byte(from), []byte(to), 1)
	if bytes.Equal(out, raw) {
		t.Fatalf("%s is not in %s", from, raw)
	}
	return out
}

// annotate sets an annotation of the memory's part.
func (b *bundle) annotate(key, value string) {
	b.manifest(func(m *v1.Manifest) { m.Layers[1].Annotations[key] = value })
}

func stream(t testing.TB, content []byte, o ...zstd.EOption) []byte {
	t.Helper()
	var out bytes.Buffer
	z, err := zstd.NewWriter(&out, o...)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := z.Write(content); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// TestHostile: each pack is refused with its reason, and leaves no files. Those
// that are wrong in more than the archive are refused from a registry, too.
func TestHostile(t *testing.T) {
	good := packed(t, small(t), PackOptions{})
	r := newRegistry(t)
	for i, c := range hostile {
		t.Run(c.name, func(t *testing.T) {
			b := open(t, good)
			c.edit(b)
			_, parent, err := unpackInto(t, b.bytes(), UnpackOptions{})
			wantRefused(t, parent, err, "unpack snapshot", c.say)
			if strings.HasPrefix(c.name, "file:") {
				return
			}
			name := fmt.Sprintf("hostile:%d", i)
			r.put(t, name, b)
			_, parent, err = r.pull(t, name, UnpackOptions{})
			wantRefused(t, parent, err, "pull snapshot")
		})
	}
}

// TestLimits: sizes and ratios are bounded, regardless of the manifests.
func TestLimits(t *testing.T) {
	b := packed(t, small(t), PackOptions{})
	_, parent, err := unpackInto(t, b, UnpackOptions{Limits: Limits{Bytes: 19 * page, Ratio: 1}})
	wantRefused(t, parent, err, "more than 77824 bytes", "--max-size")
	if _, _, err = unpackInto(t, b, UnpackOptions{Limits: Limits{Bytes: 20 * page, Ratio: 1}}); err != nil {
		t.Error(err)
	}
	// Content that compresses well, but is not zeros.
	full := makeSnapshot(t, content{size: 4 * page, pages: []uint64{0}}, content{size: 4 * page, pages: []uint64{0}, seed: 1})
	same := bytes.Repeat([]byte{0x41}, PartSize)
	bomb, err := snapshot.Make(filepath.Join(t.TempDir(), "bomb"), func(sb *snapshot.Builder) (*snapshot.Snapshot, error) {
		ref := layer.Ref{Digest: layer.Digest(sha(same)), Size: PartSize}
		m := full.Manifest()
		m.Memory, m.Disks = whole(ref), nil
		if err := sb.FillLayer(t.Context(), ref, writeAll(same)); err != nil {
			return nil, err
		}
		return sb.Commit(m, full.State())
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bomb.Close() }() // only read from
	b = packed(t, bomb, PackOptions{})
	_, parent, err = unpackInto(t, b, UnpackOptions{Limits: Limits{Bytes: 1 << 30, Ratio: 300, RatioFloor: 1 << 20}})
	wantRefused(t, parent, err, "more than 300 times larger", "--max-ratio")
	got, _, err := unpackInto(t, b, UnpackOptions{})
	if err != nil {
		t.Fatal(err)
	}
	wantSame(t, got, bomb)
}

// TestFlipped: a changed byte is noticed anywhere, unless it has no meaning.
func TestFlipped(t *testing.T) {
	snap := small(t)
	key, public := newKeys(t)
	good := packed(t, snap, PackOptions{Key: key})
	refused := 0
	for i := 0; i < len(good); i += 97 {
		b := bytes.Clone(good)
		b[i] ^= 0x21
		got, parent, err := unpackInto(t, b, UnpackOptions{Key: public})
		if err != nil {
			wantRefused(t, parent, err)
			refused++
			continue
		}
		wantSame(t, got, snap)
	}
	if all := len(good)/97 + 1; refused < all/2 {
		t.Errorf("%d of %d were refused: most of a pack has a meaning", refused, all)
	}
}

// TestTruncated: a truncated pack is refused, wherever it ends.
func TestTruncated(t *testing.T) {
	good := packed(t, small(t), PackOptions{})
	end := bytes.LastIndexByte(good, '}') // the rest of the archive has no content
	for n := 0; n <= end; n += 101 {
		_, parent, err := unpackInto(t, good[:n], UnpackOptions{})
		wantRefused(t, parent, err, "unpack snapshot")
	}
}

// FuzzParse: any manifest and configuration that are accepted keep the bounds
// that unpacking relies on.
func FuzzParse(f *testing.F) {
	snap := small(f)
	b := open(f, packed(f, snap, PackOptions{}))
	index := decode[v1.IndexManifest](f, b.find(indexName).content)
	manifest := b.find(blobName(index.Manifests[0])).content
	config, err := snap.Manifest().Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(manifest, config)
	f.Add([]byte(`{"schemaVersion":2}`), config)
	f.Fuzz(func(t *testing.T, manifest, config []byte) {
		a, err := parse(manifest)
		if err != nil {
			return
		}
		m, err := snapshot.ParseManifest(config)
		if err != nil {
			m = snap.Manifest()
		}
		parts, err := a.arrange(m)
		if err != nil {
			return
		}
		refs := m.Layers()
		if len(parts) != len(refs) {
			t.Fatalf("%d lists of parts for %d layers", len(parts), len(refs))
		}
		n := 1
		for i, list := range parts {
			var end uint64
			for _, p := range list {
				if p.offset < end || p.size == 0 || p.size > PartSize || p.offset+p.size > refs[i].Size || p.layer != refs[i].Digest {
					t.Fatalf("part %+v of %+v", p, refs[i])
				}
				end = p.offset + p.size
				n++
			}
		}
		if n != len(a.parts) {
			t.Fatalf("%d of %d parts are used", n, len(a.parts))
		}
	})
}

// FuzzRead: any file either becomes the snapshot that it names, or leaves
// nothing.
func FuzzRead(f *testing.F) {
	f.Add(packed(f, small(f), PackOptions{}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		parent := t.TempDir()
		snap, err := Read(t.Context(), bytes.NewReader(b), int64(len(b)), filepath.Join(parent, "snapshot"), UnpackOptions{Limits: Limits{Bytes: 1 << 24, Ratio: 10}})
		if err != nil {
			wantRefused(t, parent, err)
			return
		}
		defer func() { _ = snap.Close() }() // only read from
		if err := snap.Verify(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}
