// Package seccomp builds the system call filter that every process inside the
// boundary runs under, bubblewrap's pid 1 included: classic BPF in the form that
// `bwrap --seccomp FD` reads. It is pure (same input, same bytes, on every host),
// loads nothing itself, and never asks for a user-space notifier: the kernel
// allows one per process, and an inner sandbox may want it.
//
// What is refused, how, and why stands in table.go alone. A filter narrows what
// the kernel is asked; it is no replacement for namespaces, mounts and dropped
// capabilities, which decide what may be reached.
package seccomp

import (
	"encoding/binary"
	"fmt"
	"math"
	"sort"

	"golang.org/x/net/bpf"
)

// Options choose between the variants of the filter.
type Options struct {
	// Nesting leaves user namespaces to the processes inside, for runtimes with a
	// sandbox of their own. Without it no process inside can make or join one.
	Nesting bool
	// Signals: the sandbox is halted by SIGSTOP to each process, so none may be woken by a
	// SIGCONT that the kernel sends for it.
	Signals bool
}

// Return values of a filter (linux/seccomp.h); the errno goes into the low 16 bits.
const (
	retKillProcess = 0x80000000
	retErrno       = 0x00050000
	retAllow       = 0x7fff0000
)

// Offsets in struct seccomp_data. Both architectures are little-endian, so the
// low half of an argument comes first.
const (
	offNr   = 0
	offArch = 4
	offArgs = 16
)

// abi is what differs between architectures.
type abi struct {
	audit uint32 // AUDIT_ARCH_*
	calls map[string]uint32
}

// Filter returns the filter for arch ("amd64" or "arm64", as runtime.GOARCH says)
// as an array of struct sock_filter, ready to be written to the descriptor that
// `bwrap --seccomp` is given. The error names an architecture that has no table.
func Filter(arch string, opts Options) ([]byte, error) {
	prog, err := program(arch, opts, table)
	if err != nil {
		return nil, err
	}
	raw, err := bpf.Assemble(prog)
	if err != nil {
		return nil, fmt.Errorf("seccomp: assemble the filter for %s: %w", arch, err)
	}
	out := make([]byte, 0, 8*len(raw))
	for _, r := range raw {
		out = binary.LittleEndian.AppendUint16(out, r.Op)
		out = append(out, r.Jt, r.Jf)
		out = binary.LittleEndian.AppendUint32(out, r.K)
	}
	return out, nil
}

// span is a run of system call numbers, from start to the next span's start, that
// share one piece of code.
type span struct {
	start uint32
	code  []bpf.Instruction
}

// program builds the filter: architecture first, then a binary search over the
// numbers, whose leaves hold the code of one call or of one run of equal calls.
// Up to the leaves it uses only what the kernel's action cache can follow (loads
// of number and architecture, JEQ, JGE, JA, RET), so that since Linux 5.11 the
// calls which are always allowed never run the filter at all.
func program(arch string, opts Options, rows []row) ([]bpf.Instruction, error) {
	a, ok := abis[arch]
	if !ok {
		return nil, fmt.Errorf("seccomp: architecture %q has no filter: only amd64 and arm64 have one; agents can run here with --no-sandbox alone", arch)
	}
	spans := spansOf(a, opts, rows)
	prog := []bpf.Instruction{
		bpf.LoadAbsolute{Off: offArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: a.audit, SkipTrue: 1},
		bpf.RetConstant{Val: foreignABI},
		bpf.LoadAbsolute{Off: offNr, Size: 4},
	}
	prog = append(prog, search(spans)...)
	// BPF_MAXINSNS; bwrap and the kernel would refuse it with a bare EINVAL.
	if len(prog) > 4096 {
		return nil, fmt.Errorf("seccomp: the filter for %s has %d instructions: the kernel takes 4096", arch, len(prog))
	}
	return prog, nil
}

// spansOf turns the table into runs of numbers that cover all of 0 to 2^32-1.
func spansOf(a abi, opts Options, rows []row) []span {
	allow := []bpf.Instruction{bpf.RetConstant{Val: retAllow}}
	byNr := map[uint32][]row{}
	for _, r := range rows {
		nr, ok := a.calls[r.call]
		if !ok || !r.in(opts) {
			continue
		}
		byNr[nr] = append(byNr[nr], r)
	}
	nrs := make([]uint32, 0, len(byNr))
	for nr := range byNr {
		nrs = append(nrs, nr)
	}
	sort.Slice(nrs, func(i, j int) bool { return nrs[i] < nrs[j] })

	spans := []span{{0, allow}}
	put := func(start uint32, code []bpf.Instruction) {
		last := &spans[len(spans)-1]
		switch {
		case last.start == start:
			last.code = code
			if n := len(spans); n > 1 && sameReturn(spans[n-2].code, code) {
				spans = spans[:n-1]
			}
		case !sameReturn(last.code, code):
			spans = append(spans, span{start, code})
		}
	}
	for _, nr := range nrs {
		put(nr, rowsCode(byNr[nr]))
		put(nr+1, allow)
	}
	// Everything above the newest call that was reviewed; x32 numbers lie there too.
	put(newest+1, []bpf.Instruction{bpf.RetConstant{Val: retErrno | unknownCall}})
	// -1 is no call: a tracer writes it to skip one. The kernel answers ENOSYS to it,
	// and an answer of ours would overwrite the value the tracer chose.
	put(math.MaxUint32, allow)
	return spans
}

// sameReturn tells whether both pieces of code are the same bare return.
func sameReturn(a, b []bpf.Instruction) bool {
	return len(a) == 1 && len(b) == 1 && a[0] == b[0]
}

// search builds the decision tree. The number is in the accumulator.
func search(spans []span) []bpf.Instruction {
	if len(spans) == 1 {
		return spans[0].code
	}
	mid := len(spans) / 2
	low, high := search(spans[:mid]), search(spans[mid:])
	var node []bpf.Instruction
	if len(low) <= math.MaxUint8 {
		node = []bpf.Instruction{bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: spans[mid].start, SkipTrue: uint8(len(low))}}
	} else {
		// A conditional jump reaches 255 instructions; a plain one reaches all.
		node = []bpf.Instruction{
			bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: spans[mid].start, SkipFalse: 1},
			bpf.Jump{Skip: uint32(len(low))},
		}
	}
	node = append(node, low...)
	return append(node, high...)
}

// rowsCode is the code of one system call: its rows in order, the first that fits
// decides; none: allowed.
func rowsCode(rows []row) []bpf.Instruction {
	var code []bpf.Instruction
	for _, r := range rows {
		code = append(code, rowCode(r)...)
		if len(r.when) == 0 {
			return code
		}
	}
	return append(code, bpf.RetConstant{Val: retAllow})
}

// rowCode returns r's answer if all of its conditions hold, else it runs off its end.
func rowCode(r row) []bpf.Instruction {
	size := 1
	for _, c := range r.when {
		size += 1 + len(c.values)
	}
	code := make([]bpf.Instruction, 0, size)
	for _, c := range r.when {
		code = append(code, bpf.LoadAbsolute{Off: offArgs + 8*c.arg, Size: 4})
		for i, v := range c.values {
			left := len(c.values) - 1 - i        // compares of this condition still to come
			fails := uint8(size - len(code) - 1) // to the end of the row
			j := bpf.JumpIf{Cond: bpf.JumpEqual, Val: v}
			if c.op == anyBit {
				j.Cond = bpf.JumpBitsSet
			}
			if c.op == noneOf {
				j.SkipTrue = fails
			} else {
				j.SkipTrue = uint8(left)
				if left == 0 {
					j.SkipFalse = fails
				}
			}
			code = append(code, j)
		}
	}
	return append(code, bpf.RetConstant{Val: retErrno | uint32(r.errno)})
}
