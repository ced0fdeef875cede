package peers

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// writeArchive packs a root filesystem into an archive in the format of docker save:
// an image of one layer for amd64, with a name.
func writeArchive(dir, reference, out string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("pack %s as an image: %w", dir, err)
		}
	}()
	tag, err := name.NewTag(reference)
	if err != nil {
		return err
	}
	layerFile := out + ".layer"
	defer func() { err = errors.Join(err, os.RemoveAll(layerFile)) }()
	if err := writeLayer(dir, layerFile); err != nil {
		return err
	}
	layer, err := tarball.LayerFromFile(layerFile)
	if err != nil {
		return err
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return err
	}
	config = config.DeepCopy()
	config.Architecture, config.OS = "amd64", "linux"
	config.Config.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	config.Config.Cmd = []string{"/bin/sh"}
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return err
	}
	return tarball.WriteToFile(out, tag, image)
}

// writeLayer makes a tar of a folder. It drops times, so that the same folder always
// gives the same image.
func writeLayer(dir, out string) (err error) {
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := tar.NewWriter(f)
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		return addFile(w, dir, path, d)
	})
	return errors.Join(err, w.Close())
}

func addFile(w *tar.Writer, dir, path string, d fs.DirEntry) error {
	info, err := d.Info()
	if err != nil {
		return err
	}
	var target string
	if info.Mode()&fs.ModeSymlink != 0 {
		if target, err = os.Readlink(path); err != nil {
			return err
		}
	}
	h, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	if h.Name, err = filepath.Rel(dir, path); err != nil {
		return err
	}
	if d.IsDir() {
		h.Name += "/"
	}
	h.Uname, h.Gname, h.ModTime = "", "", time.Unix(0, 0)
	if err := w.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return errors.Join(err, f.Close())
}
