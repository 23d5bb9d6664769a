package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/runtimes"
)

// registry is an npm registry that has one package, and a second server beside it.
type registry struct {
	mu     sync.Mutex
	login  bool     // it asks for one
	tokens []string // that it was shown
	hits   int      // of the second server
}

// ownAddress is one of this machine that is not on the loopback.
func ownAddress(t *testing.T) string {
	t.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && n.IP.IsGlobalUnicast() {
			return n.IP.String()
		}
	}
	t.Skip("missing: an address of this machine that is not on the loopback")
	return ""
}

func packed(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for name, text := range files {
		if err := w.WriteHeader(&tar.Header{Name: "package/" + name, Mode: 0o755, Size: int64(len(text)), Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// A real npm installs from a registry of the test. The package's script looks around: it sees
// the registry alone, and nothing of the user.
func TestRuntimesAreInstalledBehindABoundaryThatReachesTheRegistryAlone(t *testing.T) {
	s := newSite(t)
	for _, p := range []string{"npm", "node"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("missing: %s", p)
		}
	}
	addr := ownAddress(t)
	rt, err := runtimes.NewRegistry(nil).Get("codex-acp")
	if err != nil {
		t.Fatal(err)
	}
	canary := s.write("canary", "secret of the user")
	reg := &registry{}
	serve := func(h http.HandlerFunc) string {
		l, err := net.Listen("tcp4", net.JoinHostPort(addr, "0"))
		if err != nil {
			t.Skip("missing: ", err)
		}
		srv := &http.Server{Handler: h}
		go srv.Serve(l)
		t.Cleanup(func() { srv.Close() })
		return l.Addr().String()
	}
	other := serve(func(http.ResponseWriter, *http.Request) {
		reg.mu.Lock()
		defer reg.mu.Unlock()
		reg.hits++
	})
	tarball := packed(t, map[string]string{
		"package.json": fmt.Sprintf(`{"name":%q,"version":%q,"bin":{%q:"run.js"},"scripts":{"postinstall":"node look.js"}}`, rt.NPM, rt.Version, rt.Programs[0]),
		"run.js":       "#!/usr/bin/env node\n",
		"look.js": fmt.Sprintf(`const fs = require('fs'); const seen = {ran: true};
try { seen.canary = fs.readFileSync(%q, 'utf8') } catch {}
try { seen.npmrc = fs.readFileSync(require('os').homedir() + '/.npmrc', 'utf8') } catch {}
seen.env = Object.values(process.env).join(' ').includes('token-of-the-user');
// Not behind the fetch: Node may end where a connection is refused before that says so.
process.on('exit', () => fs.writeFileSync('seen.json', JSON.stringify(seen)));
fetch('http://%s/').then(() => { seen.other = true }, () => {})`, canary, other),
	})
	sum := sha512.Sum512(tarball)
	var at string
	at = serve(func(w http.ResponseWriter, r *http.Request) {
		reg.mu.Lock()
		defer reg.mu.Unlock()
		if token := r.Header.Get("Authorization"); token != "" {
			reg.tokens = append(reg.tokens, token)
		}
		switch {
		case reg.login && r.Header.Get("Authorization") == "":
			w.WriteHeader(http.StatusUnauthorized)
		case strings.HasSuffix(r.URL.Path, ".tgz"):
			w.Write(tarball)
		case strings.Trim(r.URL.Path, "/") == rt.NPM:
			if err := json.NewEncoder(w).Encode(map[string]any{
				"name": rt.NPM, "dist-tags": map[string]string{"latest": rt.Version},
				"versions": map[string]any{rt.Version: map[string]any{
					"name": rt.NPM, "version": rt.Version, "bin": map[string]string{rt.Programs[0]: "run.js"}, "hasInstallScript": true,
					"scripts": map[string]string{"postinstall": "node look.js"},
					"dist":    map[string]string{"tarball": "http://" + at + "/p.tgz", "integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:])},
				}},
			}); err != nil {
				t.Error(err)
			}
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	})
	npmrc := s.write("npmrc", fmt.Sprintf("registry=http://%s/\n//%s/:_authToken=token-of-the-user\n", at, at))
	s.env = append(s.env, "npm_config_userconfig="+npmrc)

	reg.login = true
	s.fails(1, []string{"asks for a login", "npm_config_registry", "npm install -g"}, "runtimes", "install", rt.ID)
	if exists(filepath.Join(s.root, "runtimes", rt.ID, "bin")) {
		t.Error("something was installed")
	}
	reg.mu.Lock()
	if reg.login = false; len(reg.tokens) != 0 {
		t.Errorf("the registry was shown %q", reg.tokens)
	}
	reg.mu.Unlock()
	// The control: the user's own npm has that login.
	out, err := s.finishOutside("npm", "view", rt.NPM, "version")
	if err != nil || len(reg.tokens) == 0 {
		t.Errorf("the control: %v, %s", err, out)
	}

	if out := s.ok("runtimes", "install", rt.ID); !strings.Contains(out, rt.Version) {
		t.Error(out)
	}
	if !exists(filepath.Join(s.root, "runtimes", rt.ID, "bin", rt.Programs[0])) {
		t.Error("its program is not there")
	}
	b, err := os.ReadFile(filepath.Join(s.root, "runtimes", rt.ID, rt.Version, "node_modules", rt.NPM, "seen.json"))
	if string(b) != `{"ran":true,"env":false}` {
		t.Errorf("the package's script: %s, %v", b, err)
	}
	if reg.hits != 0 {
		t.Error("another server was reached")
	}
	if r, err := client.Get("http://" + other); err != nil { // the control
		t.Error(err)
	} else {
		r.Body.Close()
	}
	s.fails(1, []string{"not installed by us"}, "runtimes", "upgrade", "claude-acp")
	s.ok("runtimes", "remove", rt.ID)
	if exists(filepath.Join(s.root, "runtimes", rt.ID)) {
		t.Error("it is still there")
	}
}

// finishOutside runs a program of the host, as the user does.
func (s *site) finishOutside(argv ...string) (string, error) {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env, cmd.Dir = s.env, s.base
	out, err := cmd.CombinedOutput()
	return string(out), err
}
