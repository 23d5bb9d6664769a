package supervisor

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/gitclone"
	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

func TestWhatAPushLeftIsRecordedAndWhatIsNoRefTakenAway(t *testing.T) {
	root, repo := t.TempDir(), t.TempDir()
	put := func(name, text string) {
		t.Helper()
		path := filepath.Join(repo, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	a, b := strings.Repeat("a", 40), strings.Repeat("b", 40)
	put("refs/heads/main", a)
	put("refs/heads/operators.lock", "")
	put("objects/pack/p", "")
	before, err := gitclone.Read(repo)
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(wire.Spec{Version: wire.Version, Agent: "a", Socket: "/s", Launcher: "/l", ExecOnly: true, Policy: sandbox.Policy{Root: root, Repository: repo}}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	s.openAudit()
	defer s.audit.Close()
	put("refs/heads/main", b)
	put("refs/heads/new", a)
	put("refs/heads/cut.lock", "")
	put("refs/heads/text", "no ref")
	if err := os.Symlink("/etc/passwd", filepath.Join(repo, "objects/pack/link")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(repo, "refs/heads/fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.received(before, launch.End{Code: 137, Text: "killed"})
	var said []string
	err = audit.Read(audit.Path(root, "a"), func(line []byte) error {
		var r audit.Record
		if err := json.Unmarshal(line, &r); err != nil {
			return err
		}
		said = append(said, r.Event+" "+r.Detail["ref"]+strings.TrimPrefix(r.Path, repo))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(said)
	want := []string{"push-odd /objects/pack/link", "push-odd /refs/heads/fifo", "push-odd /refs/heads/text", "pushed refs/heads/main", "pushed refs/heads/new"}
	if !slices.Equal(said, want) {
		t.Errorf("recorded: %q", said)
	}
	var left []string
	for _, dir := range []string{"refs/heads", "objects/pack"} {
		names, err := os.ReadDir(filepath.Join(repo, dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			left = append(left, n.Name())
		}
	}
	if !slices.Equal(left, []string{"main", "new", "operators.lock", "p"}) {
		t.Errorf("left: %q", left)
	}
}
