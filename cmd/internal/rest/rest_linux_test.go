package rest

import (
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"
)

// smaps of a program with relocations: what was written to by them is read-only now,
// in memory or swapped.
const smaps = `55d0c0000000-55d0c0462000 r-xp 00000000 fe:00 11 /usr/lib/a b/program
Rss:                4000 kB
Anonymous:             0 kB
Swap:                  0 kB
VmFlags: rd ex mr mw me
55d0c0463000-55d0c08cb000 r--p 00463000 fe:00 11 /usr/lib/a b/program
Rss:                3000 kB
Anonymous:             0 kB
Swap:                  0 kB
55d0c08cb000-55d0c09b7000 r--p 008cb000 fe:00 11 /usr/lib/a b/program
Rss:                 944 kB
Anonymous:           828 kB
Swap:                  0 kB
55d0c09b7000-55d0c0a17000 rw-p 009b7000 fe:00 11 /usr/lib/a b/program
Anonymous:             0 kB
Swap:                  0 kB
55d0c0a17000-55d0c0b00000 r--p 00a17000 fe:00 11 /usr/lib/a b/program
Rss:                   0 kB
Anonymous:             0 kB
Swap:                828 kB
c000000000-c000400000 rw-p 00000000 00:00 0
Anonymous:           100 kB
Swap:                  0 kB
7f0000000000-7f0000001000 r--p 00000000 fe:00 12 /usr/lib/a b/program.so
Anonymous:             0 kB
Swap:                  0 kB
7f0000002000-7f0000001000 r--p 00000000 fe:00 11 /usr/lib/a b/program
Anonymous:             0 kB
Swap:                  0 kB
7f0000002000-7f0000003000 r--p 00000000 fe:00 11 /usr/lib/a b/program
`

func TestWhatIsDroppedIsWhatStandsInTheFile(t *testing.T) {
	got := programPages(strings.NewReader(smaps), "/usr/lib/a b/program")
	if want := []pages{{0x55d0c0000000, 0x55d0c0462000}, {0x55d0c0463000, 0x55d0c08cb000}}; !reflect.DeepEqual(got, want) {
		t.Errorf("%x, want %x", got, want)
	}
}

func FuzzProgramPages(f *testing.F) {
	f.Add(smaps, "/usr/lib/a b/program")
	f.Fuzz(func(t *testing.T, smaps, exe string) {
		for _, p := range programPages(strings.NewReader(smaps), exe) {
			if p.from >= p.to {
				t.Errorf("%x", p)
			}
		}
	})
}

// snapshot is what smaps says now.
func snapshot(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// resident is how much of the program's file the process had, in kB.
func resident(t *testing.T, smaps string) (kB int) {
	t.Helper()
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m) `+regexp.QuoteMeta(exe)+`\nSize:.*\n(?:.*PageSize:.*\n)*Rss: +(\d+) kB`).FindAllStringSubmatch(smaps, -1) {
		n, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		kB += n
	}
	return kB
}

// touch reads all of the program's file that is mapped.
func touch(t *testing.T) {
	t.Helper()
	mem, err := os.Open("/proc/self/mem")
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	for _, p := range ours() {
		if _, err := mem.ReadAt(make([]byte, p.to-p.from), int64(p.from)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAtRestTheProgramsPagesAreGoneAndComeBack(t *testing.T) {
	if len(ours()) == 0 {
		t.Fatal("no mapping of this program is found")
	}
	touch(t)
	full := snapshot(t)
	shed()
	shedded := snapshot(t)
	touch(t)
	again := resident(t, snapshot(t))
	before, after := resident(t, full), resident(t, shedded)
	if after > before*3/4 { // reading this takes some of it
		t.Errorf("%d kB of the program before, %d kB after", before, after)
	}
	if before < 1000 {
		t.Errorf("%d kB of the program is not all of it, so this shows nothing", before)
	}
	if again < before {
		t.Errorf("%d kB came back of %d kB", again, before)
	}
}

// What a debugger or a probe wrote into the program between two rests stays.
func TestWhatIsWrittenIntoTheProgramLaterStays(t *testing.T) {
	shed()
	mapped := ours()
	p := mapped[len(mapped)-1]
	mem, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	// The last byte of the file's pages, which nobody needs.
	was, now := make([]byte, 1), make([]byte, 1)
	if _, err := mem.ReadAt(was, int64(p.to-1)); err != nil {
		t.Fatal(err)
	}
	if _, err := mem.WriteAt([]byte{was[0] + 1}, int64(p.to-1)); err != nil {
		t.Fatal(err)
	}
	defer drop(p) // for the other tests
	shed()
	if _, err := mem.ReadAt(now, int64(p.to-1)); err != nil || now[0] != was[0]+1 {
		t.Errorf("%x was written, and now there is %x: %v", was[0]+1, now, err)
	}
}

const percent = 40

var sink []byte

func TestRestEndsWithWhatUsesMemory(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(math.MaxInt64))
	k := &Keeper{Percent: percent, changed: make(chan bool), after: time.Millisecond}
	// percentNow is what is set.
	percentNow := func() int {
		p := debug.SetGCPercent(1)
		debug.SetGCPercent(p)
		return p
	}
	k.Stir()
	if p := percentNow(); p != percent {
		t.Errorf("%d %% before the rest, want %d", p, percent)
	}
	if !<-k.changed {
		t.Error("no rest")
	}
	if p := percentNow(); p != -1 {
		t.Errorf("%d %% at rest: the runtime collects every two minutes", p)
	}
	k.mu.Lock()
	k.after = time.Hour // no second rest in this test
	k.mu.Unlock()
	for woke := false; !woke; {
		sink = make([]byte, 256<<10)
		select {
		case resting := <-k.changed:
			woke = !resting
		default:
			runtime.Gosched()
		}
	}
	if p := percentNow(); p != percent {
		t.Errorf("%d %% afterwards, want %d", p, percent)
	}
}

// The collection with which a rest begins finds what the one before had left to be found.
func TestLaterRestsLast(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(math.MaxInt64))
	runtime.GC()
	k := &Keeper{Percent: percent, changed: make(chan bool), after: time.Millisecond}
	for range 3 {
		k.Stir()
		if !<-k.changed {
			t.Fatal("no rest")
		}
		select {
		case <-k.changed:
			t.Fatal("the rest ended, and nothing had happened")
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func TestBusyIsNotAtRest(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	k := &Keeper{Percent: percent, after: time.Hour}
	k.Stir()
	for began := processorTime(); processorTime()-began <= nothing; {
		sink = make([]byte, 1<<10)
	}
	k.look()
	if k.resting || !k.armed {
		t.Errorf("resting %v, will look again %v", k.resting, k.armed)
	}
	k.look()
	if !k.resting || k.armed {
		t.Errorf("idle: resting %v, will look again %v", k.resting, k.armed)
	}
	k.Stir()
	if k.resting || !k.armed {
		t.Errorf("stirred: resting %v, will look again %v", k.resting, k.armed)
	}
}

// Of a program with relocations (as packages have it) nothing is lost either.
func TestRelocatedProgramsGoOn(t *testing.T) {
	if os.Getenv("REST_TEST_PIE") != "" {
		t.Skip("this is the program that another one made")
	}
	program := filepath.Join(t.TempDir(), "pie")
	build := command(t, "go", "test", "-c", "-buildmode=pie", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	run := command(t, program, "-test.v", "-test.run", "Rest")
	run.Env = append(os.Environ(), "REST_TEST_PIE=1")
	out, err := run.CombinedOutput()
	if err != nil || strings.Count(string(out), "--- PASS") != 4 {
		t.Errorf("%v: %s", err, out)
	}
}

func command(t *testing.T, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(t.Context(), name, args...)
}
