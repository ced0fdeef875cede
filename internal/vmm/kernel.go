package vmm

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/vmm/guestmem"
)

// loadKernel copies the segments of an uncompressed ELF kernel to their
// physical addresses and returns the physical entry point and the end of the
// kernel's memory.
func loadKernel(mem *guestmem.Memory, f *os.File) (entry, end uint64, err error) {
	bin, err := elf.NewFile(f)
	if err != nil {
		return 0, 0, fmt.Errorf("load kernel: not an uncompressed ELF vmlinux: %w", err)
	}
	if bin.Class != elf.ELFCLASS64 || bin.Machine != elf.EM_X86_64 {
		return 0, 0, fmt.Errorf("load kernel: %v %v: only x86-64 vmlinux files boot here", bin.Class, bin.Machine)
	}
	for _, p := range bin.Progs {
		if p.Type != elf.PT_LOAD || p.Memsz == 0 {
			continue
		}
		if p.Paddr < highMemory || p.Filesz > p.Memsz || !mem.Contains(p.Paddr, p.Memsz) {
			return 0, 0, fmt.Errorf("load kernel: segment %#x+%#x does not fit into %d MiB of RAM above 1 MiB: give the guest more memory",
				p.Paddr, p.Memsz, mem.Size()>>20)
		}
		if err := readRange(mem, f, int64(p.Off), p.Paddr, p.Filesz); err != nil {
			return 0, 0, fmt.Errorf("load kernel segment %#x: %w", p.Paddr, err)
		}
		end = max(end, p.Paddr+p.Memsz)
	}
	if end == 0 {
		return 0, 0, errors.New("load kernel: no loadable segment")
	}
	return bin.Entry, end, nil
}

// readChunk bounds one transfer; a Range's length has 32 bits.
const readChunk = 1 << 30

// readRange fills n bytes of guest memory from a file. It fails if the file is
// too short.
func readRange(mem *guestmem.Memory, f *os.File, off int64, gpa, n uint64) error {
	for n > 0 {
		k := min(n, readChunk)
		got, err := mem.ReadFile(int(f.Fd()), off, []guestmem.Range{{GPA: gpa, Len: uint32(k)}})
		if err != nil {
			return err
		}
		if uint64(got) < k {
			return fmt.Errorf("file ends %d bytes early", n-uint64(got))
		}
		off, gpa, n = off+got, gpa+k, n-k
	}
	return nil
}

// loadInitrd puts the initial ramdisk as high in low RAM as possible.
func loadInitrd(mem *guestmem.Memory, f *os.File, kernelEnd uint64) (gpa, size uint64, err error) {
	info, err := f.Stat()
	if err != nil {
		return 0, 0, fmt.Errorf("load initrd: %w", err)
	}
	size = uint64(info.Size())
	low := min(mem.Size(), guestmem.GapStart)
	if size > low || low-size < kernelEnd {
		return 0, 0, fmt.Errorf("load initrd: %d MiB do not fit beside the kernel into %d MiB of RAM: give the guest more memory",
			size>>20, mem.Size()>>20)
	}
	gpa = (low - size) &^ (guestmem.PageSize - 1)
	if err := readRange(mem, f, 0, gpa, size); err != nil {
		return 0, 0, fmt.Errorf("load initrd: %w", err)
	}
	return gpa, size, nil
}
