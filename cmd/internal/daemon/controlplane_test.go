package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/config"
)

func TestTheKeyIsFoundWhereItIsKept(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	key, empty := file("key", "from-file\n"), file("empty", "\n")
	credential := file("credentials/"+CredentialName, "from-credential")
	given := []string{"CREDENTIALS_DIRECTORY=" + filepath.Dir(credential)}
	for _, c := range []struct {
		conf config.ControlPlane
		env  []string
		want string // the key, or a word of the error
		bad  bool
	}{
		{config.ControlPlane{Key: "from-config", KeyFile: key}, given, "from-config", false},
		{config.ControlPlane{KeyFile: key}, given, "from-file", false},
		{config.ControlPlane{}, given, "from-credential", false},
		{config.ControlPlane{}, nil, "agentconnect login", true},
		{config.ControlPlane{KeyFile: empty}, nil, "empty", true},
		{config.ControlPlane{KeyFile: filepath.Join(dir, "none")}, nil, "none", true},
	} {
		r := &remote{d: &Daemon{cfg: &config.Config{ControlPlane: c.conf}, o: Options{Environ: c.env}}}
		got, err := r.key()
		if (err != nil) != c.bad || !c.bad && got != c.want || c.bad && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %q, %v", c.conf, got, err)
		}
	}
	// It is read for each handshake: a new one counts without a restart.
	r := &remote{d: &Daemon{cfg: &config.Config{ControlPlane: config.ControlPlane{KeyFile: key}}}}
	file("key", "renewed")
	if got, err := r.key(); got != "renewed" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}
