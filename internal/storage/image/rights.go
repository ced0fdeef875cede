package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"

	"agentrun.dev/internal/durable"
)

// rights is the content of rights.json: which images all namespaces may use, and the
// names that each namespace has. Images with root's names (names.json) are published as
// well. If neither file mentions an image of the store, only root may use it.
type rights struct {
	Schema int                   `json:"schema"`
	Images map[Digest]imageRight `json:"images"`
	// Namespaces has the digest of each name of a namespace. A name is the proof that the
	// namespace may use the image: it got the image from its registry.
	Namespaces map[string]map[string]Digest `json:"namespaces"`
}

// imageRight has the rights to one image.
type imageRight struct {
	Published bool `json:"published,omitempty"`
	// Sources are the repositories that all of the image came from. A namespace that
	// gets the image's manifest from one of them needs no other proof.
	Sources []string `json:"sources,omitempty"`
}

const (
	rightsName = "rights.json"
	// maxSources bounds the sources of an image. Further ones are not remembered: a
	// pull from there fetches the layers as a proof.
	maxSources = 64
)

// beginRights makes rights.json in a store of an earlier AgentRun, which had no
// rights: all namespaces could use its images, and still may.
func (s *Store) beginRights() error {
	if _, err := os.Stat(s.path(rightsName)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return s.locked(context.Background(), func() error {
		if _, err := os.Stat(s.path(rightsName)); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		all, err := s.digests()
		if err != nil {
			return err
		}
		r := newRights()
		for _, d := range all {
			r.Images[d] = imageRight{Published: true}
		}
		return s.writeRights(r)
	})
}

func newRights() rights {
	return rights{Schema: 1, Images: map[Digest]imageRight{}, Namespaces: map[string]map[string]Digest{}}
}

func (s *Store) readRights() (rights, error) {
	b, err := os.ReadFile(s.path(rightsName))
	if err != nil {
		return rights{}, fmt.Errorf("read the rights to images: %w", err)
	}
	r, err := decodeRights(b)
	if err != nil {
		return r, fmt.Errorf("read the rights to images in %s: %w", s.path(rightsName), err)
	}
	return r, nil
}

func decodeRights(b []byte) (rights, error) {
	r := newRights()
	if err := json.Unmarshal(b, &r); err != nil {
		return r, err
	}
	if r.Schema != 1 {
		return r, fmt.Errorf("it has schema %d, this AgentRun knows 1", r.Schema)
	}
	digests := slices.Collect(maps.Keys(r.Images))
	for _, names := range r.Namespaces {
		digests = slices.AppendSeq(digests, maps.Values(names))
	}
	for _, d := range digests {
		if _, err := ParseDigest(string(d)); err != nil {
			return r, err
		}
	}
	if r.Images == nil {
		r.Images = map[Digest]imageRight{}
	}
	if r.Namespaces == nil {
		r.Namespaces = map[string]map[string]Digest{}
	}
	return r, nil
}

func (s *Store) writeRights(r rights) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := durable.WriteFile(s.path(rightsName), append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write the rights to images: %w", err)
	}
	return nil
}

// changeRights replaces rights.json. The store is locked.
func (s *Store) changeRights(change func(rights)) error {
	r, err := s.readRights()
	if err != nil {
		return err
	}
	change(r)
	return s.writeRights(r)
}

// give gives an image a name in a namespace.
func (r rights) give(namespace string, d Digest, named []Reference) {
	if r.Namespaces[namespace] == nil {
		r.Namespaces[namespace] = map[string]Digest{}
	}
	for _, name := range named {
		r.Namespaces[namespace][name.String()] = d
	}
}

// take takes a name away from a namespace.
func (r rights) take(namespace, name string) {
	delete(r.Namespaces[namespace], name)
	if len(r.Namespaces[namespace]) == 0 {
		delete(r.Namespaces, namespace)
	}
}

// forget removes all entries of some images.
func (r rights) forget(some map[Digest]bool) {
	for d := range some {
		delete(r.Images, d)
	}
	for namespace, names := range r.Namespaces {
		for name, digest := range names {
			if some[digest] {
				r.take(namespace, name)
			}
		}
	}
}

func (r rights) publish(d Digest, yes bool) {
	i := r.Images[d]
	i.Published = yes
	r.Images[d] = i
}

// cameFrom notes that all of an image came from a repository.
func (r rights) cameFrom(d Digest, repository string) {
	i := r.Images[d]
	if repository == "" || slices.Contains(i.Sources, repository) || len(i.Sources) >= maxSources {
		return
	}
	i.Sources = append(slices.Clone(i.Sources), repository)
	r.Images[d] = i
}

// named returns the names of an image by namespace.
func (r rights) named(d Digest) map[string][]string {
	out := map[string][]string{}
	for namespace, names := range r.Namespaces {
		for name, digest := range names {
			if digest == d {
				out[namespace] = append(out[namespace], name)
			}
		}
		slices.Sort(out[namespace])
	}
	return out
}

// catalog has both files: all names of images and all rights to them.
type catalog struct {
	names  names
	rights rights
}

func (s *Store) readCatalog() (c catalog, err error) {
	if c.names, err = s.readNames(); err == nil {
		c.rights, err = s.readRights()
	}
	return c, err
}

// published reports whether all namespaces may use an image.
func (c catalog) published(d Digest) bool {
	if c.rights.Images[d].Published {
		return true
	}
	for _, named := range c.names.Names {
		if named == d {
			return true
		}
	}
	return false
}

// may reports whether a namespace may use an image.
func (c catalog) may(namespace string, d Digest) bool {
	for _, named := range c.rights.Namespaces[namespace] {
		if named == d {
			return true
		}
	}
	return c.published(d)
}

// ResolveIn finds an image that a namespace may use: by one of its own names, by a
// published name, by its digest, or by the first 12 digits or more of that. It does not
// reveal other images: ErrNotFound.
func (s *Store) ResolveIn(namespace, text string) (*Image, error) {
	c, err := s.readCatalog()
	if err != nil {
		return nil, err
	}
	d, err := s.resolveIn(c, namespace, text)
	if err != nil {
		return nil, err
	}
	return s.loadIn(c, namespace, d)
}

// loadIn reads an image with the names that a namespace sees.
func (s *Store) loadIn(c catalog, namespace string, d Digest) (*Image, error) {
	img, err := s.loadNamed(c.names, d)
	if err != nil {
		return nil, err
	}
	img.Names = append(img.Names, c.rights.named(d)[namespace]...)
	slices.Sort(img.Names)
	img.Names = slices.Compact(img.Names)
	return img, nil
}

func (s *Store) resolveIn(c catalog, namespace, text string) (Digest, error) {
	if ref, err := ParseReference(text); err == nil {
		if d, ok := c.rights.Namespaces[namespace][ref.String()]; ok {
			return d, nil
		}
	}
	return s.resolve(c.names, text, func(d Digest) bool { return c.may(namespace, d) })
}

// Visible is an image that a namespace may use. Its names are the namespace's own and the
// published ones.
type Visible struct {
	*Image
	Published bool
}

// ListIn lists the images that a namespace may use, sorted by digest: those after a
// digest, and at most this many.
func (s *Store) ListIn(namespace, after string, most int) (out []Visible, err error) {
	c, err := s.readCatalog()
	if err != nil {
		return nil, err
	}
	all, err := s.digests()
	if err != nil {
		return nil, err
	}
	known := c.byDigest()
	slices.Sort(all)
	for _, d := range all {
		names, own := known[d].names, known[d].namespaces[namespace]
		published := c.rights.Images[d].Published || len(names) > 0
		if string(d) <= after || len(own) == 0 && !published {
			continue
		}
		if len(out) >= most {
			break
		}
		img, err := s.load(d)
		if err != nil {
			continue // removed meanwhile, or damaged: root's list says so
		}
		img.Names = slices.Concat(names, own)
		slices.Sort(img.Names)
		img.Names = slices.Compact(img.Names)
		out = append(out, Visible{img, published})
	}
	return out, nil
}

// namesOf are the names of one image, sorted.
type namesOf struct {
	names      []string // published ones
	namespaces map[string][]string
}

// byDigest returns the names of each image. A caller that goes through all images computes
// them once, not once for each image.
func (c catalog) byDigest() map[Digest]namesOf {
	out := map[Digest]namesOf{}
	for _, name := range slices.Sorted(maps.Keys(c.names.Names)) {
		d := c.names.Names[name]
		of := out[d]
		of.names = append(of.names, name)
		out[d] = of
	}
	for namespace, names := range c.rights.Namespaces {
		for _, name := range slices.Sorted(maps.Keys(names)) {
			d := names[name]
			of := out[d]
			if of.namespaces == nil {
				of.namespaces = map[string][]string{}
			}
			of.namespaces[namespace] = append(of.namespaces[namespace], name)
			out[d] = of
		}
	}
	return out
}
