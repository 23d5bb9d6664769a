package archtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestSmallProgramsLinkWhatHasAReason(t *testing.T) {
	seen := 0
	for _, p := range list(t, "linux", "amd64") {
		if reasons, ok := linked[p.ImportPath]; ok {
			seen++
			for _, line := range unlisted(p, reasons) {
				t.Error(line)
			}
		}
	}
	if seen != len(linked) {
		t.Errorf("%d of %d programs were looked at", seen, len(linked))
	}
	p := Package{ImportPath: "x", Deps: []string{"net/http", module + "/units", "example.org/a/b", "example.org/c"}}
	if got := unlisted(p, map[string]string{"example.org/a": "", "example.org/d": ""}); len(got) != 2 || !strings.Contains(got[0], "does not link example.org/d") || !strings.Contains(got[1], "links example.org/c") {
		t.Errorf("got %q", got)
	}
}

// Each start of an agent starts each of them: what a package does before main is paid each time.
func TestSmallProgramsDoNextToNothingBeforeMain(t *testing.T) {
	const most = 16 << 10 // bytes that one of our packages allocates
	for program := range linked {
		binary := filepath.Join(t.TempDir(), "program")
		build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-o", binary, "./"+strings.TrimPrefix(program, module+"/"))
		build.Dir = top
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("go build: %v: %s", err, out)
		}
		cmd := exec.CommandContext(t.Context(), binary)
		cmd.Env = []string{"GODEBUG=inittrace=1"}
		out, _ := cmd.CombinedOutput() // without arguments it only complains
		ours := 0
		for line := range strings.Lines(string(out)) {
			f := strings.Fields(line) // init PACKAGE @0.5 ms, 0.01 ms clock, 1234 bytes, 5 allocs
			if len(f) < 9 || f[0] != "init" || !strings.HasPrefix(f[1], module) && f[1] != "main" {
				continue
			}
			ours++
			var bytes int
			at := slices.Index(f, "bytes,")
			if at < 0 {
				t.Fatalf("no bytes in %q", line)
			}
			if _, err := fmt.Sscan(f[at-1], &bytes); err != nil || bytes > most {
				t.Errorf("%s: %s allocates %d bytes before main, over %d: make it when it is first used (cmd/internal/lazyregexp) (%v)", program, f[1], bytes, most, err)
			}
		}
		if ours == 0 {
			t.Errorf("%s tells of none of our packages: %s", program, out)
		}
	}
}
