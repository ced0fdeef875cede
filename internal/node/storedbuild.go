package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"agentrun.dev/internal/node/buildlog"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// pulls has the images that builds have pulled, by namespace and by the name in its
// templates. They are removed with the namespace's last template that uses them. Images
// from other sources stay.
//
// pulled has the images of earlier versions, in which images belonged to no namespace. They
// are published, and are removed with the last template of any namespace.
var (
	pulls  = journal.Collection[pulledImage]("pulls")
	pulled = journal.Collection[pulledImage]("pulled")
)

type pulledImage struct {
	Namespace sandbox.Namespace `json:"namespace,omitempty"`
	Name      string            `json:"name"`
}

// key is the key of the record in pulls, or in pulled. Names contain no spaces.
func (p pulledImage) key() string {
	if p.Namespace == "" {
		return p.Name
	}
	return string(p.Namespace) + " " + p.Name
}

func (p pulledImage) in() journal.Collection[pulledImage] {
	if p.Namespace == "" {
		return pulled
	}
	return pulls
}

// pulledFor reports whether builds have pulled an image that a template of a namespace names.
func (m *Manager) pulledFor(n sandbox.Namespace, name string) (found bool, err error) {
	err = m.db.View(func(tx *journal.Tx) error {
		for _, p := range []pulledImage{{n, name}, {"", name}} {
			if !found && err == nil {
				_, found, err = p.in().Get(tx, p.key())
			}
		}
		return err
	})
	return found, err
}

// notePull is called before a build pulls an image. So even after a crash the next
// daemon knows the namespace of the image.
func (m *Manager) notePull(n sandbox.Namespace, name string) error {
	m.imageTurn.Lock()
	defer m.imageTurn.Unlock()
	p := pulledImage{n, name}
	return m.db.Update(func(tx *journal.Tx) error { return pulls.Put(tx, p.key(), p) })
}

// countBuild counts the size on disk of a build that is over in the quota of its
// namespace, or refuses it.
func (m *Manager) countBuild(b *sandbox.Build, image string) error {
	found, err := m.pulledFor(b.Template.Namespace, image)
	if err != nil {
		return err
	}
	if !found {
		b.Pulled = 0
	}
	if b.Kept, err = m.measureBuild(*b); err != nil {
		return err
	}
	return m.capacity.store(b.Template.Namespace, b.Kept, b.Shares()...)
}

// countFailed is countBuild for a failed build, which leaves its log and its image. If the
// quota has no room for them, it removes the image, and then the log, and notes that in the
// build.
func (m *Manager) countFailed(b *sandbox.Build, image string) (err error) {
	failed := *b
	b.Pulled = 0
	if b.Kept, err = m.measureBuild(*b); err != nil {
		return err
	}
	found, err := m.pulledFor(b.Template.Namespace, image)
	if found && failed.Pulled > 0 && m.capacity.store(b.Template.Namespace, b.Kept, failed.Shares()...) == nil {
		b.Pulled = failed.Pulled
		return nil
	}
	if found {
		err = errors.Join(err, m.dropRefused(failed, image))
	}
	refused := m.capacity.store(b.Template.Namespace, b.Kept)
	if refused == nil {
		return err
	}
	b.Kept = 0
	b.Problem += fmt.Sprintf(" (its log is not kept: the quota of namespace %s has no room for it)", b.Template.Namespace)
	return errors.Join(err, buildlog.Remove(m.logFile(b.Snapshot)))
}

// measureBuild is the size on disk of a build's snapshot, which includes a copy
// of the image's root filesystem, and of its log.
func (m *Manager) measureBuild(b sandbox.Build) (bytes uint64, err error) {
	bytes, err = snapshot.BytesBeside(m.snapshotDir(b.Snapshot), func(string) bool { return false })
	if errors.Is(err, fs.ErrNotExist) {
		bytes, err = 0, nil
	}
	log, logErr := buildlog.Size(m.logFile(b.Snapshot))
	return bytes + log, errors.Join(err, logErr)
}

// uncountBuild takes back the count of a build that has left the journal, or no longer
// counts. b is the build as it was counted.
func (m *Manager) uncountBuild(b sandbox.Build) {
	if b.Counts() {
		m.capacity.discard(b.Template.Namespace, b.Kept, b.Shares()...)
	}
}

// dropImages removes images that builds have pulled and that no template of their
// namespace uses any more.
func (m *Manager) dropImages() error {
	m.imageTurn.Lock()
	defer m.imageTurn.Unlock()
	unused := map[pulledImage]bool{}
	note := func(_ string, p pulledImage) error {
		unused[p] = true
		return nil
	}
	err := m.db.View(func(tx *journal.Tx) error {
		if err := errors.Join(pulls.Each(tx, "", note), pulled.Each(tx, "", note)); err != nil || len(unused) == 0 {
			return err
		}
		return templates.Each(tx, "", func(_ string, t sandbox.Template) error {
			delete(unused, pulledImage{t.Namespace, t.Spec.Image})
			delete(unused, pulledImage{"", t.Spec.Image})
			return nil
		})
	})
	for p := range unused {
		err = errors.Join(err, m.dropImage(p))
	}
	return err
}

// dropImage removes an image that a build has pulled. If the image is in use, that is
// tried again after the next build. The caller has the turn of images.
func (m *Manager) dropImage(p pulledImage) error {
	gone, err := m.cfg.Builder.DropImage(context.WithoutCancel(m.ctx), p.Namespace, p.Name)
	if err != nil || !gone {
		return err
	}
	return m.db.Update(func(tx *journal.Tx) error { return p.in().Delete(tx, p.key()) })
}

// dropRefused removes the image of a build that its quota has refused, unless another build
// of the namespace is charged for it. Otherwise the image would stay without being charged.
func (m *Manager) dropRefused(b sandbox.Build, image string) error {
	for _, share := range b.Shares() {
		if m.capacity.isShared(b.Template.Namespace, share.ID) {
			return nil
		}
	}
	if b.Pulled == 0 {
		return nil
	}
	m.imageTurn.Lock()
	defer m.imageTurn.Unlock()
	return m.dropImage(pulledImage{b.Template.Namespace, image})
}

// builds measures the remains of builds that an earlier version has not
// counted.
func (m measurer) builds(tx *journal.Tx) error {
	var unknown []sandbox.Build
	err := builds.Each(tx, "", func(_ string, b sandbox.Build) error {
		if b.Over() && b.Kept == 0 {
			unknown = append(unknown, b)
		}
		return nil
	})
	for _, b := range unknown {
		var measureErr error
		b.Kept, measureErr = m.manager.measureBuild(b)
		err = errors.Join(err, measureErr, builds.Put(tx, keyOf(b).String(), b))
	}
	return err
}
