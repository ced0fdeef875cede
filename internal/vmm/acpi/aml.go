package acpi

import "encoding/binary"

// The AML encoder: each function returns the bytes of one term (ACPI 6.5
// §20.2). It covers only the terms that the DSDT needs.

const (
	opZero       = 0x00
	opOne        = 0x01
	opName       = 0x08
	opByte       = 0x0a
	opWord       = 0x0b
	opDWord      = 0x0c
	opString     = 0x0d
	opQWord      = 0x0e
	opScope      = 0x10
	opBuffer     = 0x11
	opPackage    = 0x12
	opMethod     = 0x14
	opExtPrefix  = 0x5b
	opExtDevice  = 0x82
	opArg0       = 0x68
	opNotify     = 0x86
	opEqual      = 0x93
	opIf         = 0xa0
	endTag       = 0x79
	resIO        = 0x47
	resMemory32  = 0x86
	resInterrupt = 0x89
)

func join(parts ...[]byte) []byte {
	var b []byte
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

// withLength prefixes body with a PkgLength, which counts itself (§20.2.4).
func withLength(body []byte) []byte {
	n := len(body)
	switch {
	case n+1 < 1<<6:
		return append([]byte{byte(n + 1)}, body...)
	case n+2 < 1<<12:
		n += 2
		return append([]byte{1<<6 | byte(n&0xf), byte(n >> 4)}, body...)
	default:
		n += 3
		return append([]byte{2<<6 | byte(n&0xf), byte(n >> 4), byte(n >> 12)}, body...)
	}
}

func integer(v uint64) []byte {
	switch {
	case v == 0:
		return []byte{opZero}
	case v == 1:
		return []byte{opOne}
	case v <= 0xff:
		return []byte{opByte, byte(v)}
	case v <= 0xffff:
		return binary.LittleEndian.AppendUint16([]byte{opWord}, uint16(v))
	case v <= 0xffff_ffff:
		return binary.LittleEndian.AppendUint32([]byte{opDWord}, uint32(v))
	default:
		return binary.LittleEndian.AppendUint64([]byte{opQWord}, v)
	}
}

func text(s string) []byte { return append(append([]byte{opString}, s...), 0) }

func name(n string, value []byte) []byte { return join([]byte{opName}, []byte(n), value) }

func pkg(elements ...[]byte) []byte {
	return append([]byte{opPackage}, withLength(append([]byte{byte(len(elements))}, join(elements...)...))...)
}

func scope(path string, terms ...[]byte) []byte {
	return append([]byte{opScope}, withLength(append([]byte(path), join(terms...)...))...)
}

func device(n string, terms ...[]byte) []byte {
	return append([]byte{opExtPrefix, opExtDevice}, withLength(append([]byte(n), join(terms...)...))...)
}

func method(n string, args byte, terms ...[]byte) []byte {
	body := append([]byte(n), args)
	return append([]byte{opMethod}, withLength(append(body, join(terms...)...))...)
}

func ifEqual(a, b []byte, terms ...[]byte) []byte {
	cond := join([]byte{opEqual}, a, b)
	return append([]byte{opIf}, withLength(append(cond, join(terms...)...))...)
}

func notify(object string, value uint64) []byte {
	return join([]byte{opNotify}, []byte(object), integer(value))
}

// eisaID packs a seven-character PNP id into its compressed form (§19.6.35).
func eisaID(id string) []byte {
	hex := func(c byte) uint32 {
		if c >= 'A' {
			return uint32(c-'A') + 10
		}
		return uint32(c - '0')
	}
	v := uint32(id[0]-0x40)<<26 | uint32(id[1]-0x40)<<21 | uint32(id[2]-0x40)<<16 |
		hex(id[3])<<12 | hex(id[4])<<8 | hex(id[5])<<4 | hex(id[6])
	return binary.BigEndian.AppendUint32(nil, v)
}

func eisa(id string) []byte { return append([]byte{opDWord}, eisaID(id)...) }

// resources is a Buffer that holds a resource template (§6.4). A zero
// checksum byte means "not checked".
func resources(descriptors ...[]byte) []byte {
	data := append(join(descriptors...), endTag, 0)
	return append([]byte{opBuffer}, withLength(append(integer(uint64(len(data))), data...))...)
}

// ioPorts is an I/O port descriptor with 16-bit decode (§6.4.2.5).
func ioPorts(base uint16, count byte) []byte {
	return []byte{resIO, 1, byte(base), byte(base >> 8), byte(base), byte(base >> 8), 1, count}
}

// memory32 is a 32-bit fixed memory descriptor, read-write (§6.4.3.4).
func memory32(base, size uint32) []byte {
	b := []byte{resMemory32, 9, 0, 1}
	b = binary.LittleEndian.AppendUint32(b, base)
	return binary.LittleEndian.AppendUint32(b, size)
}

// edgeInterrupt is an extended interrupt descriptor: consumer, edge, active
// high, exclusive (§6.4.3.6). Edge, because a level interrupt would cost the
// guest an exit at each end-of-interrupt.
func edgeInterrupt(gsi uint32) []byte {
	b := []byte{resInterrupt, 6, 0, 0x03, 1}
	return binary.LittleEndian.AppendUint32(b, gsi)
}
