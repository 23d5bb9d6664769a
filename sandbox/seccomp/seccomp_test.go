// The filter as a value: same bytes every time, the same decision as a plain
// reading of the table, cheap for calls that are always allowed.

package seccomp

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/bpf"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write the golden files anew")

// variants are all the filters there are.
func variants() []struct {
	name, arch string
	opts       Options
} {
	return []struct {
		name, arch string
		opts       Options
	}{
		{"amd64", "amd64", Options{}},
		{"amd64-nesting", "amd64", Options{Nesting: true}},
		{"amd64-signals", "amd64", Options{Signals: true}},
		{"arm64", "arm64", Options{}},
		{"arm64-nesting", "arm64", Options{Nesting: true}},
		{"arm64-signals", "arm64", Options{Signals: true}},
	}
}

func TestFilterIsTheReviewedOne(t *testing.T) {
	for _, v := range variants() {
		t.Run(v.name, func(t *testing.T) {
			raw, err := Filter(v.arch, v.opts)
			if err != nil {
				t.Fatal(err)
			}
			again, err := Filter(v.arch, v.opts)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(raw, again); d != "" {
				t.Fatalf("two calls gave different bytes:\n%s", d)
			}
			got := listing(t, raw)
			path := filepath.Join("testdata", v.name+".golden")
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(string(want), got); d != "" {
				t.Errorf("filter changed (-reviewed +now); after review: go test ./sandbox/seccomp -update\n%s", d)
			}
		})
	}
}

// listing decodes the bytes again, so the golden file holds both bytes and meaning.
func listing(t *testing.T, raw []byte) string {
	t.Helper()
	if len(raw)%8 != 0 {
		t.Fatalf("%d bytes are no array of sock_filter", len(raw))
	}
	var b strings.Builder
	for i := 0; i < len(raw); i += 8 {
		r := bpf.RawInstruction{
			Op: binary.LittleEndian.Uint16(raw[i:]),
			Jt: raw[i+2], Jf: raw[i+3],
			K: binary.LittleEndian.Uint32(raw[i+4:]),
		}
		fmt.Fprintf(&b, "%3d  %x  %v\n", i/8, raw[i:i+8], r.Disassemble())
	}
	return b.String()
}

func TestUnknownArchitectureIsAnError(t *testing.T) {
	for _, arch := range []string{"", "riscv64", "386", "AMD64"} {
		if raw, err := Filter(arch, Options{}); err == nil || raw != nil {
			t.Errorf("Filter(%q) = %d bytes, %v; want an error and no bytes", arch, len(raw), err)
		}
	}
}

func TestEveryLineHasAReasonAndACall(t *testing.T) {
	for i, r := range table {
		_, amd := abis["amd64"].calls[r.call]
		_, arm := abis["arm64"].calls[r.call]
		if !amd && !arm {
			t.Errorf("line %d: %s has a number on no architecture", i, r.call)
		}
		if r.why == "" || r.errno == 0 || r.errno > 4095 {
			t.Errorf("line %d (%s): errno %d, reason %q", i, r.call, r.errno, r.why)
		}
		for _, c := range r.when {
			if c.arg > 5 || len(c.values) == 0 {
				t.Errorf("line %d (%s): argument %d, %d values", i, r.call, c.arg, len(c.values))
			}
		}
	}
	for _, o := range leftOpen {
		if o.why == "" {
			t.Errorf("%s is left open without a reason", o.call)
		}
	}
}

// decide reads the table the way a person does.
func decide(arch string, opts Options, audit, nr uint32, args [6]uint64) uint32 {
	a := abis[arch]
	if audit != a.audit {
		return foreignABI
	}
	if nr == math.MaxUint32 {
		return retAllow
	}
	if nr > newest {
		return retErrno | unknownCall
	}
	for _, r := range table {
		if n, ok := a.calls[r.call]; !ok || n != nr || !r.in(opts) {
			continue
		}
		fits := true
		for _, c := range r.when {
			v := uint32(args[c.arg])
			var equal, bit bool
			for _, w := range c.values {
				equal = equal || v == w
				bit = bit || v&w != 0
			}
			fits = fits && map[op]bool{oneOf: equal, noneOf: !equal, anyBit: bit}[c.op]
		}
		if fits {
			return retErrno | uint32(r.errno)
		}
	}
	return retAllow
}

// packet is struct seccomp_data as the virtual machine of x/net/bpf reads it: it
// loads words big-endian, where the kernel takes them as they lie.
func packet(audit, nr uint32, args [6]uint64) []byte {
	p := make([]byte, 64)
	binary.BigEndian.PutUint32(p[offNr:], nr)
	binary.BigEndian.PutUint32(p[offArch:], audit)
	for i, v := range args {
		binary.BigEndian.PutUint32(p[offArgs+8*i:], uint32(v))
		binary.BigEndian.PutUint32(p[offArgs+8*i+4:], uint32(v>>32))
	}
	return p
}

func machine(t testing.TB, arch string, opts Options) *bpf.VM {
	t.Helper()
	prog, err := program(arch, opts, table)
	if err != nil {
		t.Fatal(err)
	}
	vm, err := bpf.NewVM(prog)
	if err != nil {
		t.Fatal(err)
	}
	return vm
}

func TestFilterDecidesAsTheTableReads(t *testing.T) {
	var values []uint64
	for _, r := range table {
		for _, c := range r.when {
			for _, v := range c.values {
				values = append(values, uint64(v), uint64(v)|1<<32, uint64(v)|1<<63, uint64(v)+1, uint64(v)<<32)
			}
		}
	}
	for _, v := range variants() {
		t.Run(v.name, func(t *testing.T) {
			vm := machine(t, v.arch, v.opts)
			a := abis[v.arch]
			var nrs []uint32
			for _, r := range table {
				if nr, ok := a.calls[r.call]; ok {
					nrs = append(nrs, nr, nr+1, nr-1, nr|0x40000000)
				}
			}
			nrs = append(nrs, newest, newest+1, 0x3fffffff, 0x40000000, 0x7fffffff, 0x80000000, math.MaxUint32-1, math.MaxUint32)
			rapid.Check(t, func(t *rapid.T) {
				audit := rapid.OneOf(rapid.Just(a.audit), rapid.Just(a.audit), rapid.Just(a.audit),
					rapid.SampledFrom([]uint32{0x40000003, 0x40000028, auditArchX8664, auditArchAarch64}), rapid.Uint32()).Draw(t, "audit")
				nr := rapid.OneOf(rapid.SampledFrom(nrs), rapid.Uint32Range(0, newest+2), rapid.Uint32()).Draw(t, "nr")
				var args [6]uint64
				for i := range args {
					args[i] = rapid.OneOf(rapid.SampledFrom(values), rapid.Uint64()).Draw(t, fmt.Sprint("arg", i))
				}
				got, err := vm.Run(packet(audit, nr, args))
				if err != nil {
					t.Fatal(err)
				}
				if want := decide(v.arch, v.opts, audit, nr, args); uint32(got) != want {
					t.Fatalf("audit %#x nr %d args %#x: filter %#x, table %#x", audit, nr, args, uint32(got), want)
				}
			})
			// Every number once, with arguments that no condition knows.
			for nr := uint32(0); nr <= newest+300; nr++ {
				args := [6]uint64{3, 3, 3, 3, 3, 3}
				got, err := vm.Run(packet(a.audit, nr, args))
				if err != nil {
					t.Fatal(err)
				}
				if want := decide(v.arch, v.opts, a.audit, nr, args); uint32(got) != want {
					t.Errorf("nr %d: filter %#x, table %#x", nr, uint32(got), want)
				}
			}
		})
	}
}

// ask runs one call of the native architecture through the filter by name.
func ask(t *testing.T, vm *bpf.VM, arch, call string, args ...uint64) uint32 {
	t.Helper()
	nr, ok := abis[arch].calls[call]
	if !ok {
		t.Fatalf("%s has no number on %s", call, arch)
	}
	var six [6]uint64
	copy(six[:], args)
	got, err := vm.Run(packet(abis[arch].audit, nr, six))
	if err != nil {
		t.Fatal(err)
	}
	return uint32(got)
}

// These are written out by hand, so that table and reference cannot be wrong together.
func TestKnownDecisions(t *testing.T) {
	const refused, absent = retErrno | 1, retErrno | 38
	cases := []struct {
		call              string
		args              []uint64
		unnested, nesting uint32
	}{
		{"ioctl", []uint64{0, 0x5412}, refused, refused},
		{"ioctl", []uint64{0, 0x5412 | 1<<32}, refused, refused},
		{"ioctl", []uint64{0, 0x541c | 1<<63}, refused, refused},
		{"ioctl", []uint64{0, 0x5413}, retAllow, retAllow}, // TIOCGWINSZ
		{"ioctl", []uint64{0, 0x5401}, retAllow, retAllow}, // TCGETS
		{"ioctl", []uint64{0x5412, 0}, retAllow, retAllow},
		{"io_uring_setup", []uint64{8, 0}, absent, absent},
		{"io_uring_enter", nil, absent, absent},
		{"socket", []uint64{1, 1, 0}, retAllow, retAllow},
		{"socket", []uint64{2, 1, 0}, retAllow, retAllow},
		{"socket", []uint64{2, 1, 262}, retAllow, retAllow}, // MPTCP
		{"socket", []uint64{10, 2, 0}, retAllow, retAllow},
		{"socket", []uint64{16, 3, 0}, retAllow, retAllow},
		{"socket", []uint64{16, 3, 12}, retErrno | 93, retErrno | 93},
		{"socket", []uint64{2, 5, 132}, retErrno | 93, retErrno | 93},
		{"socket", []uint64{40, 1, 0}, retErrno | 97, retErrno | 97},
		{"socket", []uint64{40 | 1<<32, 1, 0}, retErrno | 97, retErrno | 97},
		{"socket", []uint64{38, 5, 0}, retErrno | 97, retErrno | 97},
		{"socket", []uint64{17, 3, 0}, retErrno | 97, retErrno | 97},
		{"socketpair", []uint64{1, 1, 0}, retAllow, retAllow},
		{"setsockopt", []uint64{3, 1, 64}, retAllow, retAllow}, // SOL_SOCKET
		{"setsockopt", []uint64{3, 0, 64}, retErrno | 92, retErrno | 92},
		{"clone", []uint64{0x11}, retAllow, retAllow},
		{"clone", []uint64{0x10000011}, refused, retAllow},
		{"clone", []uint64{0x10000011 | 1<<40}, refused, retAllow},
		{"clone", []uint64{1 << 60}, retAllow, retAllow}, // 0x10000000<<32: no flag the kernel knows
		{"clone3", nil, absent, retAllow},
		{"unshare", []uint64{0x10020000}, refused, retAllow},
		{"unshare", []uint64{0x20000}, retAllow, retAllow},
		{"setns", []uint64{3, 0}, refused, retAllow},
		{"setns", []uint64{3, 0x10000000}, refused, retAllow},
		{"setns", []uint64{3, 0x40000000}, retAllow, retAllow},
		{"keyctl", nil, absent, absent},
		{"bpf", nil, refused, refused},
		{"mount", nil, retAllow, retAllow},
		{"umount2", nil, retAllow, retAllow},
		{"pivot_root", nil, retAllow, retAllow},
		{"fsopen", nil, absent, absent},
		{"timer_create", nil, retAllow, retAllow},
		{"fcntl", []uint64{3, 10, 18}, retAllow, retAllow},
	}
	for _, arch := range []string{"amd64", "arm64"} {
		plain, nesting := machine(t, arch, Options{}), machine(t, arch, Options{Nesting: true})
		for _, c := range cases {
			if got := ask(t, plain, arch, c.call, c.args...); got != c.unnested {
				t.Errorf("%s %s%#x: %#x, want %#x", arch, c.call, c.args, got, c.unnested)
			}
			if got := ask(t, nesting, arch, c.call, c.args...); got != c.nesting {
				t.Errorf("%s nesting %s%#x: %#x, want %#x", arch, c.call, c.args, got, c.nesting)
			}
		}
		signals := machine(t, arch, Options{Signals: true})
		for _, c := range []struct {
			call string
			args []uint64
			want uint32
		}{
			{"timer_create", []uint64{1}, absent},
			{"fcntl", []uint64{3, 10, 18}, refused},
			{"fcntl", []uint64{3, 10 | 1<<32, 18 | 1<<40}, refused},
			{"fcntl", []uint64{3, 10, 29}, retAllow}, // SIGIO
			{"fcntl", []uint64{3, 3, 18}, retAllow},  // F_GETFL
			{"clone", []uint64{0x10000011}, refused},
		} {
			if got := ask(t, signals, arch, c.call, c.args...); got != c.want {
				t.Errorf("%s signals %s%#x: %#x, want %#x", arch, c.call, c.args, got, c.want)
			}
		}
		for _, o := range leftOpen {
			for _, vm := range []*bpf.VM{plain, nesting} {
				if got := ask(t, vm, arch, o.call); got != retAllow {
					t.Errorf("%s %s: %#x, want allowed: %s", arch, o.call, got, o.why)
				}
			}
		}
	}
}

// TestAllowedCallsAreCheap walks the filter as the kernel's action cache does: a call
// without conditions must reach its answer without a look at its arguments, soon.
func TestAllowedCallsAreCheap(t *testing.T) {
	const most = 12
	for _, v := range variants() {
		prog, err := program(v.arch, v.opts, table)
		if err != nil {
			t.Fatal(err)
		}
		conditional := map[uint32]bool{}
		for _, r := range table {
			if nr, ok := abis[v.arch].calls[r.call]; ok && len(r.when) > 0 && r.in(v.opts) {
				conditional[nr] = true
			}
		}
		for nr := uint32(0); nr <= newest; nr++ {
			steps, args := walk(t, prog, abis[v.arch].audit, nr)
			if steps > most || args != conditional[nr] {
				t.Errorf("%s nr %d: %d instructions (at most %d), looks at arguments: %v, wanted %v", v.name, nr, steps, most, args, conditional[nr])
			}
		}
	}
}

// walk runs prog up to its answer or its first look at an argument.
func walk(t *testing.T, prog []bpf.Instruction, audit, nr uint32) (steps int, args bool) {
	t.Helper()
	var acc uint32
	for pc := 0; ; pc++ {
		steps++
		switch i := prog[pc].(type) {
		case bpf.LoadAbsolute:
			switch i.Off {
			case offNr:
				acc = nr
			case offArch:
				acc = audit
			default:
				return steps, true
			}
		case bpf.Jump:
			pc += int(i.Skip)
		case bpf.JumpIf:
			yes := map[bpf.JumpTest]bool{bpf.JumpEqual: acc == i.Val, bpf.JumpGreaterOrEqual: acc >= i.Val}
			taken, known := yes[i.Cond]
			if !known {
				t.Fatalf("instruction %d: the action cache does not know %v", pc, i)
			}
			if taken {
				pc += int(i.SkipTrue)
			} else {
				pc += int(i.SkipFalse)
			}
		case bpf.RetConstant:
			return steps, false
		default:
			t.Fatalf("instruction %d: the action cache does not know %v", pc, i)
		}
	}
}
