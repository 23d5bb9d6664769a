// Package testhost gives tests the built programs and a place in the home of the ordinary
// user that runs them. It is for tests alone.
package testhost

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
)

// Bin gives the directory of our programs: that of AGENTCONNECT_TEST_BIN, or one where
// they are built once per test process.
func Bin(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("AGENTCONNECT_TEST_BIN"); dir != "" {
		return dir
	}
	built.once.Do(func() {
		if built.dir, built.err = os.MkdirTemp("", "agentconnect-bin-"); built.err != nil {
			return
		}
		root := filepath.Join("..", "..", "..")
		cmd := exec.CommandContext(context.Background(), "go", "build", "-trimpath", "-o", built.dir+"/", "./cmd/agentconnect", "./cmd/agentconnect-launch", "./cmd/agentconnect-supervisor", "./cmd/agentconnect-guest")
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		built.out, built.err = cmd.CombinedOutput()
		if built.err == nil {
			built.err = os.Chmod(built.dir, 0o755)
		}
	})
	if built.err != nil {
		t.Fatalf("building our programs: %v\n%s", built.err, built.out)
	}
	return built.dir
}

var built struct {
	once sync.Once
	dir  string
	out  []byte
	err  error
}

// Clean removes what Bin built; TestMain calls it last.
func Clean() {
	if built.dir != "" {
		os.RemoveAll(built.dir)
	}
}

// NeedBoundary skips, with what is missing, where no boundary can start.
func NeedBoundary(t testing.TB) {
	t.Helper()
	switch {
	case runtime.GOOS != "linux":
		t.Skip("missing: Linux")
	case os.Getuid() == 0:
		t.Skip("missing: an ordinary user (this test runs as root; `make test` makes one)")
	}
	if _, err := os.Stat("/usr/bin/bwrap"); err != nil {
		t.Skip("missing: /usr/bin/bwrap")
	}
}

// Home makes a directory below the real home that stands for a user's home.
func Home(t testing.TB) string {
	t.Helper()
	base, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(base, "agentconnect-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	real, err := filepath.EvalSymlinks(dir) //nolint:forbidigo // a test's own directory
	if err != nil {
		t.Fatal(err)
	}
	return real
}
