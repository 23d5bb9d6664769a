package e2e

import (
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// forge serves bare repositories over https to whoever has the password, as hosts do.
func (s *site) forge(password string, repos ...string) (url, ca string) {
	s.t.Helper()
	backend := s.outside("git --exec-path") // where Debian has git-http-backend
	backend = filepath.Join(strings.TrimSpace(backend), "git-http-backend")
	if _, err := os.Stat(backend); err != nil {
		s.t.Skipf("git-http-backend is missing: %v", err)
	}
	root := s.mkdir("forge")
	for _, r := range repos {
		s.outside(fmt.Sprintf("git init -q --bare -b main %[1]s/%[2]s.git && git -C %[1]s/%[2]s.git config http.receivepack true", root, r))
	}
	git := &cgi.Handler{Path: backend, Dir: root, Env: []string{"GIT_PROJECT_ROOT=" + root, "GIT_HTTP_EXPORT_ALL=1", "REMOTE_USER=someone"}}
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, p, ok := r.BasicAuth(); !ok || p != password {
			w.Header().Set("WWW-Authenticate", `Basic realm="forge"`)
			http.Error(w, "who are you", http.StatusUnauthorized)
			return
		}
		git.ServeHTTP(w, r)
	}))
	s.t.Cleanup(server.Close)
	return server.URL, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
}

// assign writes the agent's credential rules.
func (s *site) assign(id, rules string) {
	s.t.Helper()
	file := filepath.Join(s.agentDir(id), "agent.json")
	text := strings.TrimRight(strings.TrimSpace(s.read(file)), "}")
	s.write(file, strings.TrimRight(text, "\n ")+`, "gitCredentials": `+rules+"}")
}

func TestGitInsideReachesAssignedRepositoriesAndNoOther(t *testing.T) {
	s := newSite(t)
	const token = "ghp-canary-77123"
	url, ca := s.forge(token, "acme/app", "acme/other")
	host := strings.TrimPrefix(url, "https://")
	s.add("gil", "--network", "host", "--env", "GIT_CONFIG_COUNT=1", "--env", "GIT_CONFIG_KEY_0=http.sslCAInfo", "--env", "GIT_CONFIG_VALUE_0="+filepath.Join(s.workspace("gil"), "ca.pem"))
	s.write(filepath.Join(s.workspace("gil"), "ca.pem"), ca)
	s.secret(token+"\n", "gil", "FORGE", "--outside")
	s.assign("gil", `[{"url": "`+url+`/acme/app", "secret": "FORGE"}]`)
	s.start()
	s.ok("agent", "start", "gil")

	session := fmt.Sprintf(`set -e
git clone -q %[1]s/acme/app 2>&1
cd app; git config user.name x; git config user.email x@x
echo one > file; git add file; git commit -qm one; git push -q origin HEAD:main 2>&1
git fetch -q 2>&1; git rev-parse origin/main`, url)
	if r := s.sh("gil", session); r.code != 0 {
		t.Fatalf("clone, commit, push: exit %d: %s%s", r.code, r.out, r.err)
	}
	// The other repository is on the same host, behind the same token: outside, with the
	// token at hand, it is reached.
	if r := s.sh("gil", fmt.Sprintf("GIT_TERMINAL_PROMPT=0 git clone %s/acme/other", url)); r.code == 0 || !strings.Contains(r.err, "not assigned") {
		t.Errorf("another repository: exit %d: %s%s", r.code, r.out, r.err)
	}
	s.outside(fmt.Sprintf("git -c http.sslVerify=false clone -q %s other-outside", strings.Replace(url, "https://", "https://x:"+token+"@", 1)+"/acme/other"))

	ask := func(lines string) result {
		return s.sh("gil", fmt.Sprintf("printf '%s\\n\\n' | /run/agentconnect/guest git-credential get", lines))
	}
	if r := ask(fmt.Sprintf(`protocol=https\nhost=%s\npath=acme/app.git`, host)); !strings.Contains(r.out, "password="+token) {
		t.Fatalf("the control: what git asks gets no answer: %s%s", r.out, r.err)
	}
	for _, lines := range []string{
		`protocol=https\nhost=%s\npath=acme/other`, `protocol=http\nhost=%s\npath=acme/app`, `protocol=https\nhost=%s`, `protocol=https\nhost=%s\npath=acme`,
		`protocol=https\nhost=%s\npath=acme/other/../app`, `protocol=https\nhost=%s\npath=acme%%%%2fapp`, `protocol=https\nhost=evil.%s\npath=acme/app`,
		`protocol=https\nhost=%s.evil.net\npath=acme/app`, `protocol=https\nhost=x@%s\npath=acme/app`, `protocol=https\nhost=%s#\npath=acme/app`, `protocol=ssh\nhost=%s\npath=acme/app`,
		`url=https://%s/acme/other`, `protocol=https\nhost=%s\npath=acme/app\nhost=evil.net`,
	} {
		if r := ask(fmt.Sprintf(lines, host)); r.out != "" {
			t.Errorf("%s was answered: %s", lines, r.out)
		}
	}
	// By hand, past the guest: a line of one's own, much too long, no JSON, and a flood.
	for _, script := range []string{
		`import socket,json
c=socket.socket(socket.AF_UNIX);c.connect("/run/agentconnect/channel/socket")
c.sendall(b'{"v":1,"op":"credential","credential":{"action":"get","protocol":"https","host":"` + host + `","path":"acme/other"},"secret":"FORGE"}\n');print(c.recv(4096))`,
		`import socket
c=socket.socket(socket.AF_UNIX);c.connect("/run/agentconnect/channel/socket")
try:
  c.sendall(b"{"*1000000)
except OSError: pass
try: print(c.recv(4096))
except OSError as e: print(e)`,
		`import socket
l=[]
for i in range(200):
  c=socket.socket(socket.AF_UNIX);c.connect("/run/agentconnect/channel/socket");l.append(c)
print("connected")`,
	} {
		s.write(filepath.Join(s.workspace("gil"), "try.py"), script)
		if r := s.sh("gil", "timeout 30 python3 try.py"); strings.Contains(r.out, token) || r.code != 0 {
			t.Errorf("%s\nexit %d: %s%s", script, r.code, r.out, r.err)
		}
	}
	s.until("the flood is over and git is answered again", func() bool {
		return strings.Contains(ask(fmt.Sprintf(`protocol=https\nhost=%s\npath=acme/app`, host)).out, token)
	})
	// It rests nowhere inside, nor in what the agent leaves behind.
	if r := s.sh("gil", "grep -rs "+token+" $HOME /tmp . /run; env; tr '\\0' '\\n' < /proc/1/environ"); strings.Contains(r.out, token) {
		t.Errorf("it rests inside: %s", r.out)
	}
	log := s.read(filepath.Join(s.root, "logs/agents/gil.audit.jsonl"))
	for _, want := range []string{`"event":"given"`, url + "/acme/app", `"event":"refused"`, "acme/other is not assigned"} {
		if !strings.Contains(log, want) {
			t.Errorf("the audit log lacks %s", want)
		}
	}
	if strings.Contains(log, token) || strings.Contains(s.out.String(), token) {
		t.Error("a log has the token")
	}
	// The socket cannot be taken over from inside.
	for _, script := range []string{"rm /run/agentconnect/channel/socket", "mv /run/agentconnect/channel /run/agentconnect/x", "touch /run/agentconnect/channel/y", "chmod 666 /run/agentconnect/channel/socket"} {
		if r := s.sh("gil", script); r.code == 0 {
			t.Errorf("inside it worked: %s", script)
		}
	}
}

func TestCredentialsFromACommandOfTheOperators(t *testing.T) {
	s := newSite(t)
	tool := s.write("tools/token", `#!/bin/sh
{ echo "$*"; cat; env; } > `+filepath.Join(s.base, "asked")+`
echo "some words for the log" >&2
echo username=robot
echo password=minted-4711
`)
	s.executable(tool)
	s.add("hal")
	s.add("ida", "--grant", filepath.Join(s.base, "tools")+":rw")
	s.assign("hal", `[{"url": "https://git.example/acme/*", "command": ["`+tool+`", "--for", "hal"]}, {"url": "https://git.example/acme/broken", "command": ["/bin/false"]},
 {"url": "https://git.example/acme/unset", "secret": "NONE"}]`)
	s.start()
	// Another agent can write it: whatever it says would run outside.
	s.fails(78, []string{"runs outside the sandbox", "an agent can write"}, "agent", "start", "hal")
	s.ok("agent", "rm", "ida")
	s.ok("agent", "start", "hal")
	get := func(path string) result {
		return s.sh("hal", "printf 'protocol=https\\nhost=git.example\\npath="+path+"\\n\\n' | /run/agentconnect/guest git-credential get")
	}
	if r := get("acme/app.git"); r.out != "username=robot\npassword=minted-4711\n" {
		t.Fatalf("%q %s", r.out, r.err)
	}
	asked := s.read("asked")
	if !strings.HasPrefix(asked, "--for hal\nprotocol=https\nhost=git.example\npath=acme/app\n\n") || strings.Contains(asked, "AGENTCONNECT_ROOT") || !strings.Contains(asked, "AGENTCONNECT_AGENT=hal") {
		t.Errorf("the command was given: %s", asked)
	}
	for path, why := range map[string]string{"acme/broken": "no credentials", "acme/unset": "no credentials", "else/app": "not assigned"} {
		if r := get(path); r.out != "" || !strings.Contains(r.err, why) {
			t.Errorf("%s: %q %s", path, r.out, r.err)
		}
	}
	if log := s.read(filepath.Join(s.root, "logs/agents/hal.audit.jsonl")); !strings.Contains(log, `"event":"failed"`) || !strings.Contains(log, "secret set hal NONE") {
		t.Errorf("the audit log: %s", log)
	}
}

// What an agent asks for is on record, and no way to be rid of what else is.
func TestAnAgentCannotFloodItsRecordAway(t *testing.T) {
	s := newSite(t)
	s.add("flo")
	s.start()
	s.ok("agent", "start", "flo")
	s.write(filepath.Join(s.workspace("flo"), "flood.py"), `import socket
for i in range(2500):
  c=socket.socket(socket.AF_UNIX);c.connect("/run/agentconnect/channel/socket")
  c.sendall(b'{"v":1,"op":"credential","credential":{"action":"get","protocol":"https","host":"git.example","path":"%d/%s"}}\n' % (i,b"&"*1000))
  if not b"not assigned" in c.recv(65536): raise SystemExit("not asked")
  c.close()
c=socket.socket(socket.AF_UNIX);c.connect("/run/agentconnect/channel/socket")
c.sendall(b'{"v":1,"op":"git-config","setting":{"dir":"/x","key":"branch.x.y","value":"%s"}}\n' % (b"<"*15000))
print(c.recv(65536))
`)
	if r := s.sh("flo", "python3 flood.py"); r.code != 0 {
		t.Fatalf("%d %s%s", r.code, r.out, r.err)
	}
	s.ok("agent", "stop", "flo")
	log := s.ok("audit", "flo")
	for _, want := range []string{"started, git seals", "is not assigned to this agent", "more (refused), not recorded one by one", "config-refused"} {
		if !strings.Contains(log, want) {
			t.Errorf("the audit log lacks %q", want)
		}
	}
}

func TestGHInsideHasTheTokenOfItsRepositoryAlone(t *testing.T) {
	s := newSite(t)
	s.add("jo")
	s.secret("gh-canary-1", "jo", "GH", "--outside")
	s.assign("jo", `[{"url": "https://github.com/acme/app", "secret": "GH"}]`)
	bin := s.mkdir(filepath.Join(s.workspace("jo"), "bin"))
	// A stand-in: what matters is what it is given.
	s.executable(s.write(filepath.Join(bin, "gh"), "#!/bin/sh\necho \"args=$*\"; env | grep -E '^G(H|ITHUB)_'; true\n"))
	s.start()
	run := func(args string) result {
		return s.sh("jo", "export PATH="+bin+":$PATH; "+args)
	}
	if r := run("/run/agentconnect/guest gh pr list -R acme/app"); r.code != 0 || !strings.Contains(r.out, "args=pr list -R acme/app") || !strings.Contains(r.out, "GH_TOKEN=gh-canary-1") {
		t.Errorf("assigned: %d %s%s", r.code, r.out, r.err)
	}
	if r := run("git init -q co && cd co && git remote add origin https://github.com/Acme/app.git && /run/agentconnect/guest gh issue list"); !strings.Contains(r.out, "GH_TOKEN=gh-canary-1") {
		t.Errorf("by the checkout: %d %s%s", r.code, r.out, r.err)
	}
	if r := run("/run/agentconnect/guest gh pr list -R acme/other"); r.code == 0 || strings.Contains(r.out, "canary") || !strings.Contains(r.err, "not assigned") {
		t.Errorf("another: %d %s%s", r.code, r.out, r.err)
	}
	if r := run("gh pr list -R acme/app"); strings.Contains(r.out, "canary") {
		t.Errorf("gh by itself has it: %s", r.out)
	}
	if r := run("/run/agentconnect/guest gh --version"); r.code != 0 || strings.Contains(r.out, "canary") {
		t.Errorf("outside of a repository: %d %s%s", r.code, r.out, r.err)
	}
}
