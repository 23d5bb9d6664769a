package launch

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"agentconnect.md/sandbox/sandbox"
)

// What receives a push reads what the agent wrote. Each is what it could do once the agent
// has made it its own; none must work but those that a push needs.
func TestWhatReceivesAPushCanChangeObjectsAndRefsAlone(t *testing.T) {
	b := newBox(t)
	repo := filepath.Join(b.policy.AgentDir, "repository.git")
	for _, d := range []string{"objects/info", "objects/pack", "refs/heads"} {
		mkdir(t, filepath.Join(repo, d))
	}
	write(t, filepath.Join(repo, "config"), "[core]\n\tbare = true\n")
	write(t, filepath.Join(repo, "HEAD"), "ref: refs/heads/main\n")
	b.policy.Repository, b.policy.Receive = repo, true
	work := b.policy.Workspace
	b.policy.Workspace = mkdir(t, filepath.Join(b.policy.AgentDir, "stage"))
	b.policy.MemoryDir = ""
	write(t, filepath.Join(work, "theirs"), "x")

	at := sandbox.RepositoryPath
	for _, attack := range []string{
		"echo x >> $r/config", "mv $r/config $r/c", "echo x > $r/HEAD", "mkdir $r/hooks", "echo .. > $r/commondir", "echo x > $r/packed-refs",
		"echo x > $r/objects/info/alternates", "mv $r/objects/info $r/objects/i", "rm -rf $r/objects/info && test ! -e $r/objects/info",
		"mv $r/objects $r/o", "mv $r/refs $r/x", "ln $r/config $r/refs/heads/hard && echo x >> $r/refs/heads/hard", "chmod 777 $r/config", "touch $r/gc.pid",
	} {
		if out, code := b.run("/bin/sh", "-c", "r="+at+"; "+attack); code == 0 {
			t.Errorf("it worked: %s\n%s", attack, out)
		}
		copied := filepath.Join(t.TempDir(), "r")
		if out, err := exec.Command("/bin/sh", "-c", "cp -r "+repo+" "+copied+" && r="+copied+"; "+attack).CombinedOutput(); err != nil {
			t.Errorf("outside it fails too, so it proves nothing: %s: %v %s", attack, err, out)
		}
	}
	b.sh("r=" + at + "; echo x > $r/refs/heads/new && mv $r/refs/heads/new $r/refs/heads/newer && mkdir $r/objects/ab && echo x > $r/objects/pack/p")
	// Nothing of the agent's, nor of its user's, is there to be read.
	for _, path := range []string{filepath.Join(work, "theirs"), repo + "/config", filepath.Join(b.policy.AgentDir, "agent.json"), filepath.Join(b.home, ".ssh/id"), sandbox.ChannelPath, sandbox.SecretsPath} {
		if out, code := b.run("/bin/ls", path); code == 0 {
			t.Errorf("it sees %s: %s", path, out)
		}
	}
	if out, _ := b.run("/bin/ls", "/sys/class/net"); strings.Contains(out, "eth") {
		t.Errorf("it has a network: %s", out)
	}
	if got, err := os.ReadFile(filepath.Join(repo, "config")); err != nil || string(got) != "[core]\n\tbare = true\n" {
		t.Errorf("config: %q %v", got, err)
	}
}
