#include "textflag.h"

// func load16(p *uint16) uint16
TEXT ·load16(SB), NOSPLIT, $0-10
	MOVQ p+0(FP), AX
	MOVW (AX), CX
	MOVW CX, ret+8(FP)
	RET

// func store16(p *uint16, v uint16)
TEXT ·store16(SB), NOSPLIT, $0-10
	MOVQ p+0(FP), AX
	MOVW v+8(FP), CX
	XCHGW CX, (AX)
	RET
