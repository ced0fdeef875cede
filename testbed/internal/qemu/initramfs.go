package qemu

import (
	"bytes"
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"agentrun.dev/internal/host/cpio"
	"agentrun.dev/testbed/internal/inside"
)

// writeInitramfs writes the only file system of the VM's own: this program as /init,
// and the modules.
func writeInitramfs(path, results string, k kernel) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if err := mustBeStatic(self); err != nil {
		return err
	}
	tmp := path + ".new"
	f, err := os.Create(tmp)
	if err != nil {
		return err
	}
	defer f.Close()
	c := cpio.NewWriter(f)
	file := func(name string, data []byte) {
		c.File(name, 0o644, int64(len(data)), bytes.NewReader(data))
	}
	for _, dir := range []string{"dev", "proc", "sys", "run", "results", "session", "modules"} {
		c.Folder(dir)
	}
	// The kernel opens /dev/console for /init before devtmpfs is mounted.
	c.Device("dev/console", 5, 1)
	program, err := os.ReadFile(self)
	if err != nil {
		return err
	}
	c.File("init", 0o755, int64(len(program)), bytes.NewReader(program))
	file("results.path", []byte(results+"\n"))
	folder, err := filepath.EvalSymlinks(k.folder)
	if err != nil {
		return err
	}
	file("modules.path", []byte(folder+"\n"))
	var list strings.Builder
	for _, m := range k.modules {
		data, err := readModule(m)
		if err != nil {
			return err
		}
		name := "modules/" + strings.TrimSuffix(strings.TrimSuffix(filepath.Base(m), ".xz"), ".zst")
		file(name, data)
		fmt.Fprintf(&list, "/%s\n", name)
	}
	file(strings.TrimPrefix(inside.ModulesFile, "/"), []byte(list.String()))
	if err := c.Close(); err != nil {
		return fmt.Errorf("write the initramfs: %w", err)
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// mustBeStatic refuses a binary that needs an interpreter, because the initramfs has
// none. This program avoids package net for that reason.
func mustBeStatic(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return fmt.Errorf("%s is linked dynamically and cannot be the machine's init: build it with CGO_ENABLED=0 go build ./testbed", path)
		}
	}
	return nil
}
