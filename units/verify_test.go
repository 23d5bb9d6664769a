package units

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func TestSystemdFindsNothingWrongWithTheShippedFiles(t *testing.T) {
	if os.Getenv("AGENTCONNECT_TEST_MACHINE") == "" {
		t.Skip("missing: the test machine: make test-systemd")
	}
	dir := t.TempDir()
	args := []string{"--user", "--man=no", "--recursive-errors=no", "verify"}
	for _, file := range Files("/bin/true") {
		path := filepath.Join(dir, file.Name)
		if err := os.WriteFile(path, []byte(file.Text), 0o644); err != nil {
			t.Fatal(err)
		}
		args = append(args, path)
	}
	if out, err := exec.CommandContext(t.Context(), "systemd-analyze", args...).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	// It has to be able to find something.
	path := filepath.Join(dir, "broken.service")
	if err := os.WriteFile(path, []byte("[Service]\nTyp=notify\nExecStart=/bin/true\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, _ := exec.CommandContext(t.Context(), "systemd-analyze", "--user", "--man=no", "verify", path).CombinedOutput(); len(out) == 0 {
		t.Error("systemd-analyze verify finds nothing wrong with a misspelt setting")
	}
}
