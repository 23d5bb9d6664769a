package coredump

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A hard limit of zero cannot be made one byte, and does not keep a dump from a program that
// dumps are piped to.
func TestUnderAHardLimitOfZeroADumpHoldsNoMemory(t *testing.T) {
	const word = "AGENTCONNECT_TEST_COREDUMP"
	if os.Getenv(word) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), word+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		t.Fatal(err)
	}
	if err := Off(); err != nil {
		t.Fatal(err)
	}
	// What is started from it inherits that.
	out, err := exec.Command("/bin/cat", "/proc/self/coredump_filter").Output()
	if got := strings.Trim(strings.TrimSpace(string(out)), "0"); err != nil || len(out) == 0 || got != "" {
		t.Errorf("a dump holds kinds %q of memory, %v", out, err)
	}
}
