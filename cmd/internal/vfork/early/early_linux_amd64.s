#include "textflag.h"

// func Syscall(trap, a1, a2, a3, a4 uintptr) (r1, errno uintptr)
//
// The child's calls write over what lies below the caller's frame, the return address included: it
// is kept in a register meanwhile, which the kernel keeps for both.
TEXT ·Syscall(SB),NOSPLIT|NOFRAME,$0-56
	MOVQ	a1+8(FP), DI
	MOVQ	a2+16(FP), SI
	MOVQ	a3+24(FP), DX
	MOVQ	a4+32(FP), R10
	MOVQ	$0, R8
	MOVQ	$0, R9
	MOVQ	trap+0(FP), AX
	POPQ	R12
	SYSCALL
	PUSHQ	R12
	CMPQ	AX, $0xfffffffffffff001 // -4095, the lowest of what are errors
	JCC	failed
	MOVQ	AX, r1+40(FP)
	MOVQ	$0, errno+48(FP)
	RET
failed:
	MOVQ	$-1, r1+40(FP)
	NEGQ	AX
	MOVQ	AX, errno+48(FP)
	RET
