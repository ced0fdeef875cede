package qemu

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// neededModules are the modules of the distribution's kernel that the VM needs. Their
// dependencies come from modules.dep. Other modules can be loaded inside with
// modprobe.
var neededModules = []string{"virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay", "kvm-amd", "tun", "veth", "loop", "fuse"}

// kernel is a distribution kernel with its modules.
type kernel struct {
	image   string
	folder  string   // of all its modules
	modules []string // files of the needed modules, in loading order
}

// findKernel returns the newest kernel under root that has the needed modules.
// Debian's cloud kernels, for example, have no 9p.
func findKernel(root string) (kernel, error) {
	images, err := filepath.Glob(filepath.Join(root, "boot/vmlinuz-*"))
	if err != nil {
		return kernel{}, err
	}
	slices.SortFunc(images, compareVersions)
	slices.Reverse(images)
	var why []string
	for _, image := range images {
		version := strings.TrimPrefix(filepath.Base(image), "vmlinuz-")
		folder := filepath.Join(root, "lib/modules", version)
		modules, err := resolveModules(folder, neededModules)
		if err == nil {
			return kernel{image, folder, modules}, nil
		}
		why = append(why, fmt.Sprintf("%s: %v", image, err))
	}
	return kernel{}, fmt.Errorf("no usable kernel in %s (install linux-image-amd64: scripts/packages.sh)%s", filepath.Join(root, "boot"), strings.Join(append([]string{""}, why...), "\n  "))
}

// compareVersions orders 6.1.0-9 before 6.1.0-54.
func compareVersions(a, b string) int {
	for a != "" && b != "" {
		na, ra := leadingNumber(a)
		nb, rb := leadingNumber(b)
		if na != "" && nb != "" {
			na, nb = strings.TrimLeft(na, "0"), strings.TrimLeft(nb, "0")
			if len(na) != len(nb) {
				return len(na) - len(nb)
			}
			if c := strings.Compare(na, nb); c != 0 {
				return c
			}
			a, b = ra, rb
			continue
		}
		if a[0] != b[0] {
			return int(a[0]) - int(b[0])
		}
		a, b = a[1:], b[1:]
	}
	return len(a) - len(b)
}

func leadingNumber(s string) (number, rest string) {
	i := 0
	for i < len(s) && s[i] >= '0' && s[i] <= '9' {
		i++
	}
	return s[:i], s[i:]
}

// resolveModules returns the files of these modules, each after its dependencies.
func resolveModules(root string, names []string) ([]string, error) {
	deps, err := os.ReadFile(filepath.Join(root, "modules.dep"))
	if err != nil {
		return nil, err
	}
	builtin, err := os.ReadFile(filepath.Join(root, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	lines := make(map[string]string) // module name to its line
	for line := range strings.Lines(string(deps)) {
		file, _, _ := strings.Cut(line, ":")
		lines[moduleName(file)] = strings.TrimSpace(line)
	}
	inKernel := make(map[string]bool)
	for line := range strings.Lines(string(builtin)) {
		inKernel[moduleName(strings.TrimSpace(line))] = true
	}
	var files []string
	for _, name := range names {
		name = moduleName(name)
		if inKernel[name] {
			continue
		}
		line, ok := lines[name]
		if !ok {
			return nil, fmt.Errorf("no module %s", name)
		}
		file, needs, _ := strings.Cut(line, ":")
		// modules.dep also lists indirect dependencies, the innermost last.
		order := strings.Fields(needs)
		slices.Reverse(order)
		for _, f := range append(order, file) {
			if f = filepath.Join(root, f); !slices.Contains(files, f) {
				files = append(files, f)
			}
		}
	}
	return files, nil
}

// moduleName is a module's name derived from its file. "-" and "_" are the same.
func moduleName(file string) string {
	name, _, _ := strings.Cut(filepath.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// readModule returns a module's bytes, decompressed (Debian 13 packs them).
func readModule(file string) ([]byte, error) {
	tools := map[string]string{".xz": "xz", ".zst": "zstd", ".gz": "gzip"}
	tool, packed := tools[filepath.Ext(file)]
	if !packed {
		return os.ReadFile(file)
	}
	var out, errs bytes.Buffer
	cmd := exec.Command(tool, "-dc", file)
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("unpack %s with %s: %w %s", file, tool, err, errs.Bytes())
	}
	return out.Bytes(), nil
}

// unpackKernel extracts the vmlinux of a bzImage into the file out, once. Under
// emulation, the kernel's own decompressor takes half of the whole start. QEMU boots
// the vmlinux directly through its PVH entry.
func unpackKernel(image, out string) error {
	source, err := os.Stat(image)
	if err != nil {
		return err
	}
	if have, err := os.Stat(out); err == nil && have.ModTime().Equal(source.ModTime()) {
		return nil
	}
	payload, err := kernelPayload(image)
	if err != nil {
		return err
	}
	magics := map[string]string{"\xfd7zXZ\x00": "xz", "\x28\xb5\x2f\xfd": "zstd", "\x1f\x8b\x08": "gzip", "\x02\x21\x4c\x18": "lz4"}
	var tool string
	for magic, t := range magics {
		if bytes.HasPrefix(payload, []byte(magic)) {
			tool = t
		}
	}
	if tool == "" {
		return fmt.Errorf("%s is compressed in an unknown way", image)
	}
	tmp := out + ".new"
	f, err := os.Create(tmp)
	if err != nil {
		return err
	}
	defer f.Close()
	var errs bytes.Buffer
	cmd := exec.Command(tool, "-dc")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(payload), f, &errs
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("unpack %s with %s: %w %s", image, tool, err, errs.Bytes())
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Chtimes(tmp, source.ModTime(), source.ModTime()); err != nil {
		return err
	}
	return os.Rename(tmp, out)
}

// kernelPayload cuts the compressed vmlinux out of a bzImage, by the fields of
// its header (Documentation/x86/boot.rst: setup_sects, payload_offset,
// payload_length).
func kernelPayload(image string) ([]byte, error) {
	b, err := os.ReadFile(image)
	if err != nil {
		return nil, err
	}
	if len(b) < 0x250 || string(b[0x202:0x206]) != "HdrS" {
		return nil, fmt.Errorf("%s is not a bzImage", image)
	}
	start := (int(b[0x1f1])+1)*512 + int(binary.LittleEndian.Uint32(b[0x248:]))
	// The last four bytes are the unpacked size, not the compressor's.
	end := start + int(binary.LittleEndian.Uint32(b[0x24c:])) - 4
	if start >= end || end > len(b) {
		return nil, fmt.Errorf("%s is cut off", image)
	}
	return b[start:end], nil
}
