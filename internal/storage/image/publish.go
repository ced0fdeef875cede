package image

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// Publish lets all namespaces use an image of the store. It first looks at the names of the
// namespace, if one is given, and then finds the image as Resolve does for root. It
// publishes it under the given names, or else under the namespace's name that it was found
// by.
func (s *Store) Publish(ctx context.Context, namespace, text string, named ...Reference) (img *Image, err error) {
	err = s.locked(ctx, func() error {
		c, err := s.readCatalog()
		if err != nil {
			return err
		}
		var d Digest
		ref, refErr := ParseReference(text)
		if refErr == nil {
			d = c.rights.Namespaces[namespace][ref.String()]
		}
		switch {
		case d == "":
			if d, err = s.resolve(c.names, text, anyDigest); err != nil {
				return err
			}
		case len(named) == 0:
			named = []Reference{ref}
		}
		if _, err := s.load(d); err != nil {
			return err
		}
		if err := s.name(d, naming{names: named}); err != nil {
			return err
		}
		if c, err = s.readCatalog(); err == nil {
			img, err = s.loadIn(c, namespace, d)
		}
		return err
	})
	return img, err
}

// Unpublish takes a published name away. Without published names only the namespaces that
// have names of their own for the image may use it. With its digest it takes all published
// names away. The image stays, and so does everything made from it.
func (s *Store) Unpublish(ctx context.Context, text string) (d Digest, err error) {
	err = s.locked(ctx, func() error {
		c, err := s.readCatalog()
		if err != nil {
			return err
		}
		d, err = s.resolve(c.names, text, c.published)
		if err != nil {
			return err
		}
		return s.unname(c, d, text)
	})
	return d, err
}

// unname takes the published name text away from an image, or all published names if
// text is its digest. The store is locked.
func (s *Store) unname(c catalog, d Digest, text string) error {
	var gone []string
	last := true
	ref, refErr := ParseReference(text)
	byName := refErr == nil && c.names.Names[ref.String()] == d
	for name, digest := range c.names.Names {
		switch {
		case digest != d:
		case !byName || name == ref.String():
			gone = append(gone, name)
		default:
			last = false
		}
	}
	// The names go last: if this process is killed in between, the call can be repeated with
	// one of them. Without a name the image would stay published unseen.
	if last {
		if err := s.changeRights(func(r rights) { r.publish(d, false) }); err != nil {
			return err
		}
	}
	return s.changeNames(func(n map[string]Digest) {
		for _, name := range gone {
			delete(n, name)
		}
	})
}

// RemoveIn takes a name away from a namespace. It deletes the image if no other
// namespace has a name for it and it is not published. An image in use stays unchanged:
// ErrInUse.
func (s *Store) RemoveIn(ctx context.Context, namespace, text string) error {
	ref, err := ParseReference(text)
	if err != nil {
		return err
	}
	var trash string
	err = s.locked(ctx, func() error {
		c, err := s.readCatalog()
		if err != nil {
			return err
		}
		d, ok := c.rights.Namespaces[namespace][ref.String()]
		if !ok {
			return fmt.Errorf("image %s of namespace %s: %w", text, namespace, ErrNotFound)
		}
		c.rights.take(namespace, ref.String())
		if !c.published(d) && len(c.rights.named(d)) == 0 {
			if _, here := s.load(d); !errors.Is(here, ErrNotFound) {
				if trash, err = s.discard(d); err != nil {
					return err
				}
			}
		}
		return s.changeRights(func(r rights) { r.take(namespace, ref.String()) })
	})
	return errors.Join(err, emptyTrash(trash))
}

// naming has the names for an image that is made or found.
type naming struct {
	names []Reference
	// namespace gets the names; empty publishes them.
	namespace string
	// repository is the source of the entire image, if it came from one.
	repository string
	// proven says that the namespace has received the entire image in this
	// pull.
	proven bool
}

// errUnproven says that an image is in the store, but that the namespace has not proven
// yet that it may use it.
var errUnproven = errors.New("the right to the image is not proven")

// prove refuses to name an image in a namespace that has not proven that it may use it.
// The store is locked.
func (s *Store) prove(d Digest, as naming) error {
	if as.namespace == "" || as.proven {
		return nil
	}
	c, err := s.readCatalog()
	if err != nil {
		return err
	}
	has := len(c.rights.named(d)[as.namespace]) > 0
	if has || slices.Contains(c.rights.Images[d].Sources, as.repository) {
		return nil
	}
	return errUnproven
}

// name names an image. The store is locked.
func (s *Store) name(d Digest, as naming) error {
	err := s.changeRights(func(r rights) {
		r.cameFrom(d, as.repository)
		if as.namespace == "" {
			r.publish(d, true)
		} else {
			r.give(as.namespace, d, as.names)
		}
	})
	if err != nil || as.namespace != "" {
		return err
	}
	return s.changeNames(func(n map[string]Digest) {
		for _, ref := range as.names {
			n[ref.String()] = d
		}
	})
}

func anyDigest(Digest) bool { return true }
