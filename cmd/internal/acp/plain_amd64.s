#include "textflag.h"

// func plain16(b []byte) int
//
// 16 bytes at a time by SSE2, which every amd64 has. As signed bytes, those beyond ASCII are
// negative: "less than 0x20" finds them and the control characters at once.
TEXT ·plain16(SB), NOSPLIT, $0-32
	MOVQ b_base+0(FP), SI
	MOVQ b_len+8(FP), CX
	MOVQ SI, DI
	MOVQ $0x2222222222222222, AX
	MOVQ AX, X5
	PUNPCKLQDQ X5, X5
	MOVQ $0x5c5c5c5c5c5c5c5c, AX
	MOVQ AX, X6
	PUNPCKLQDQ X6, X6
	MOVQ $0x2020202020202020, AX
	MOVQ AX, X7
	PUNPCKLQDQ X7, X7

loop:
	CMPQ CX, $32
	JLT  last
	MOVOU (SI), X0
	MOVOU 16(SI), X8
	MOVO  X7, X3
	MOVO  X7, X4
	PCMPGTB X0, X3
	PCMPGTB X8, X4
	POR   X4, X3
	MOVO  X0, X1
	PCMPEQB X5, X1
	PCMPEQB X6, X0
	POR   X1, X3
	POR   X0, X3
	MOVO  X8, X1
	PCMPEQB X5, X1
	PCMPEQB X6, X8
	POR   X1, X3
	POR   X8, X3
	PMOVMSKB X3, AX
	TESTL AX, AX
	JNZ  last
	ADDQ $32, SI
	SUBQ $32, CX
	JMP  loop

last:
	CMPQ CX, $16
	JLT  done
	MOVOU (SI), X0
	MOVO  X7, X3
	PCMPGTB X0, X3
	MOVO  X0, X1
	PCMPEQB X5, X1
	PCMPEQB X6, X0
	POR   X1, X3
	POR   X0, X3
	PMOVMSKB X3, AX
	TESTL AX, AX
	JNZ  done
	ADDQ $16, SI
	SUBQ $16, CX
	JMP  last

done:
	SUBQ DI, SI
	MOVQ SI, ret+24(FP)
	RET
