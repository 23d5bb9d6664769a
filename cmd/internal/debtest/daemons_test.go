package debtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The maintainer scripts find a daemon that was started by hand, also when an upgrade has put
// another file in the place of its own; and nothing else.
func TestDaemonsAreFoundAfterTheirFileWasReplaced(t *testing.T) {
	script, err := os.ReadFile(filepath.Join("..", "..", "..", "packaging", "deb", "managers.sh"))
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "agentconnect")
	found := func() string {
		t.Helper()
		out, err := exec.Command("sh", "-ec", strings.ReplaceAll(string(script), "/usr/bin/agentconnect", program)+"\ndaemons").CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return strings.Join(strings.Fields(string(out)), " ")
	}
	shell, err := os.ReadFile("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	put := func() {
		t.Helper()
		if err := os.WriteFile(program+".new", shell, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(program+".new", program); err != nil {
			t.Fatal(err)
		}
	}
	start := func(words ...string) int {
		t.Helper()
		cmd := exec.Command(program, append([]string{"-c", "echo; read word"}, words...)...)
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { in.Close(); _ = cmd.Wait() })
		if _, err := out.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		return cmd.Process.Pid
	}
	put()
	old := start("agentconnect", "run", "--root", "/x")
	start("agentconnect", "prompt", "alice", "now run it")
	if got := found(); got != fmt.Sprint(old) {
		t.Errorf("found %q, want %d", got, old)
	}
	put()
	if got := found(); got != fmt.Sprint(old) {
		t.Errorf("after the upgrade: found %q, want %d", got, old)
	}
}
