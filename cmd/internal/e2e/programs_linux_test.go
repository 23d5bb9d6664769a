package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"testing"
)

// both runs script inside and outside, with HOST set, and reports whether each printed want.
// An error of the script is none: what counts are the bytes.
func (s *site) both(id, host, script, want string) (inside, outside bool, said string) {
	s.t.Helper()
	script = "HOST=" + host + "; " + script
	r := s.sh(id, script)
	o := s.finish(s.command(s.t.Context(), "/bin/sh", "-c", "cd "+s.mkdir("outside")+"; "+script))
	return strings.Contains(r.out, want), strings.Contains(o.out, want), fmt.Sprintf("inside: exit %d: %s%s\noutside: exit %d: %s%s", r.code, r.out, r.err, o.code, o.out, o.err)
}

// judged runs script for a host: it must print want outside, and inside where allowed.
func (s *site) judged(t *testing.T, id, host, script, want string, allowed bool) {
	t.Helper()
	in, out, said := s.both(id, host, script, want)
	if !out {
		t.Errorf("%s: the control outside: %s", host, said)
	}
	if in != allowed {
		t.Errorf("%s: reached from inside %v, want %v: %s", host, in, allowed, said)
	}
}

// CASES 29, 30: by name, on the ports that everybody uses, and what each says of another host
// at the same address.
func TestClientsOfHTTPSReachWhatIsAllowedByItsName(t *testing.T) {
	s := newSite(t)
	in, addrs := newInternet(s, "allowed.example", "denied.example")
	s.start()
	ca := s.write("ca.pem", in.web(addrs))
	s.add("alice", "--network", "allowlist", "--allow", "allowed.example", "--grant", ca+":ro")
	at := addrs["allowed.example"]
	for what, script := range map[string]string{
		"curl":       "curl -sS --http1.1 --max-time 20 --cacert " + ca + " https://$HOST/",
		"curl http2": "curl -sS --http2 --max-time 20 --cacert " + ca + " https://$HOST/",
		"node fetch": `NODE_EXTRA_CA_CERTS=` + ca + ` node -e "fetch('https://$HOST/').then(r => r.text()).then(t => process.stdout.write(t), e => { console.error(e.cause); process.exit(1) })"`,
		"python":     `/usr/bin/python3 -c "import ssl, urllib.request as u; print(u.urlopen('https://$HOST/', timeout=20, context=ssl.create_default_context(cafile='` + ca + `')).read().decode())"`,
		"openssl":    `printf 'GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n' $HOST | openssl s_client -quiet -connect $HOST:443 -servername $HOST 2>/dev/null`,
	} {
		t.Run(what, func(t *testing.T) {
			s.judged(t, "alice", "allowed.example", script, "page of allowed.example", true)
			s.judged(t, "alice", "denied.example", script, "page of denied.example", false)
		})
	}
	for what, script := range map[string]string{
		"another name in TLS":  "curl -sS --max-time 20 --cacert " + ca + " --connect-to $HOST:443:" + at + ":443 https://$HOST/",
		"another host in HTTP": "curl -sS --max-time 20 --connect-to $HOST:80:" + at + ":80 http://$HOST/",
		"its address":          "curl -sS --max-time 20 http://" + addrs["denied.example"] + "/ -H Host:\\ $HOST",
	} {
		t.Run(what, func(t *testing.T) {
			s.works("alice", "getent hosts allowed.example >/dev/null") // so that the address was given
			s.judged(t, "alice", "denied.example", script, "page of denied.example", false)
		})
	}
}

// sshServer serves the user's own account, with keys of the test, at addr.
func (in *internet) sshServer(keys, addr, port string) {
	s := in.s
	me, err := user.Current()
	if err != nil {
		s.t.Fatal(err)
	}
	home := s.mkdir("sshhome")
	// A passwd of its own, in a namespace of its own: the keys of the user stay what they are.
	passwd := s.write("passwd", fmt.Sprintf("%s:x:%s:%s::%s:/bin/sh\n", me.Username, me.Uid, me.Gid, home))
	hostKey := s.path("ssh-" + addr + "-" + port)
	if out, err := exec.Command("dropbearkey", "-t", "ed25519", "-f", hostKey).CombinedOutput(); err != nil {
		s.t.Fatalf("%v: %s", err, out)
	}
	s.write(filepath.Join(home, ".ssh/authorized_keys"), keys)
	in.serve("Not backgrounding", "unshare", "--user", "--map-current-user", "--keep-caps", "--mount", "sh", "-ec",
		fmt.Sprintf("mount --bind %s /etc/passwd; exec /usr/sbin/dropbear -F -E -s -r %s -p %s:%s", passwd, hostKey, addr, port))
}

// CASES 29.
func TestGitOverSSHObeysTheRules(t *testing.T) {
	s := newSite(t)
	for _, p := range []string{"ssh", "git", "dropbearkey", "/usr/sbin/dropbear"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("missing: %s", p)
		}
	}
	in, addrs := newInternet(s, "git.example", "other.example")
	s.start()
	repo := s.mkdir("repo")
	if out, err := exec.Command("sh", "-ec", `cd "$0"; git init -q -b main w; cd w; git config user.name a; git config user.email a@example.com
		echo text of the repository > f; git add f; git commit -qm first; cd ..; git clone -q --bare w r.git`, repo).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	key := s.path("key/id")
	s.mkdir("key")
	if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	in.sshServer(s.read(key+".pub"), addrs["git.example"], "22")
	in.sshServer(s.read(key+".pub"), addrs["git.example"], "2222")
	in.sshServer(s.read(key+".pub"), addrs["other.example"], "22")
	s.add("alice", "--network", "allowlist", "--allow", "git.example:22", "--grant", filepath.Dir(key)+":ro")
	clone := `d=$(mktemp -d); export GIT_SSH_COMMAND="ssh -i ` + key + ` -o IdentitiesOnly=yes -o BatchMode=yes -o ConnectTimeout=20 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
		git clone -q ssh://$HOST` + repo + `/r.git $d/c && cat $d/c/f && cd $d/c && git config user.name a && git config user.email a@example.com &&
		git commit -q --allow-empty -m second && git push -q origin HEAD:refs/heads/from-$(basename $d) && echo pushed`
	const want = "text of the repository\npushed"
	s.judged(t, "alice", "git.example", clone, want, true)
	s.judged(t, "alice", "git.example:2222", clone, want, false)
	s.judged(t, "alice", "other.example", clone, want, false)
	s.judged(t, "alice", addrs["other.example"], clone, want, false)
	// The record says what it was.
	if log := s.ok("egress", "alice"); !strings.Contains(log, "git.example:22") || !strings.Contains(log, "other.example") {
		t.Errorf("the record: %s", log)
	}
}

// CASES 35: a client that asks by HTTP/3 alone gets nothing out, and one that asks by it first
// goes on by TCP.
func TestHTTP3FallsToTCPAndNoDatagramLeaves(t *testing.T) {
	s := newSite(t)
	for _, p := range []string{"gtlsclient", "/usr/sbin/gtlsserver"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("missing: %s (ngtcp2-client, ngtcp2-server)", p)
		}
	}
	in, addrs := newInternet(s, "allowed.example")
	s.start()
	ca := s.write("ca.pem", in.web(addrs))
	at := addrs["allowed.example"]
	docs := s.mkdir("docs")
	s.write("docs/page", "page by HTTP/3")
	in.serve("Using", "/usr/sbin/gtlsserver", "-q", "-d", docs, at, "443", s.path("web/key.pem"), s.path("web/cert.pem"))
	s.add("alice", "--network", "allowlist", "--allow", "allowed.example", "--grant", ca+":ro")
	s.add("bob", "--network", "open", "--grant", ca+":ro")
	ask := "d=$(mktemp -d); timeout 20 gtlsclient -q --exit-on-all-streams-close --timeout=2s --download=$d $HOST 443 https://$HOST/page; cat $d/page"
	for _, id := range []string{"alice", "bob"} {
		before := in.datagrams()
		if r := s.sh(id, "HOST=allowed.example; "+ask); strings.Contains(r.out, "page by HTTP/3") {
			t.Errorf("%s: %s", id, r.out)
		}
		if n := in.datagrams() - before; n != 0 {
			t.Errorf("%s: %d datagrams came out", id, n)
		}
		s.judged(t, id, "allowed.example", ask, "page by HTTP/3", false)
		// A client that is told of HTTP/3 and goes on as it began.
		s.judged(t, id, "allowed.example", "curl -sS --max-time 20 --alt-svc $(mktemp) --cacert "+ca+" https://$HOST/ https://$HOST/", "page of allowed.example", true)
	}
	if out, err := exec.Command("curl", "--version").Output(); err != nil || !strings.Contains(string(out), "HTTP3") {
		t.Log("curl of this machine has no HTTP/3")
		return
	}
	s.judged(t, "alice", "allowed.example", "curl -sS --http3 --max-time 30 --cacert "+ca+" https://$HOST/", "page of allowed.example by HTTP/2.0", true)
}

// peerSet finds the sandbox-runtime package from npm: what Claude Code's own sandbox is made of.
func peerSet(t *testing.T) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	real, err := filepath.EvalSymlinks(filepath.Join(cache, "agentconnect-dev", "peer", "current"))
	if err != nil {
		t.Skipf("missing: the sandbox-runtime package from npm (packaging/dev/npm-peer.sh): %v", err)
	}
	return real
}

// An inner sandbox has a proxy of its own, which reaches what both allow.
func TestAnInnerSandboxsProxyGoesOutThroughOurs(t *testing.T) {
	set := peerSet(t)
	s := newSite(t)
	in, addrs := newInternet(s, "both.example", "inner.example", "outer.example")
	s.start()
	ca := s.write("ca.pem", in.web(addrs))
	settings := s.write("settings/srt.json", `{"network":{"allowedDomains":["both.example","inner.example"],"deniedDomains":[]},"filesystem":{"denyRead":[],"allowWrite":["/tmp"],"denyWrite":[]}}`)
	s.script("alice", `exec "$guest" selftest`, "--nesting", "on", "--network", "allowlist", "--allow", "both.example", "--allow", "outer.example",
		"--grant", ca+":ro", "--grant", settings+":ro", "--grant", set+":ro")
	srt := filepath.Join(set, "node_modules/.bin/srt") + " --settings " + settings + " -- "
	for what, fetch := range map[string]string{
		"http":  "curl -sS --max-time 30 http://$HOST/",
		"https": "curl -sS --max-time 30 --cacert " + ca + " https://$HOST/",
	} {
		t.Run(what, func(t *testing.T) {
			s.judged(t, "alice", "both.example", srt+fetch, "page of both.example", true)
			s.judged(t, "alice", "inner.example", srt+fetch, "page of inner.example", false)
			// What only ours allows the inner one refuses.
			if in, out, said := s.both("alice", "outer.example", srt+fetch, "page of outer.example"); in || out {
				t.Errorf("outer.example through the inner sandbox: %s", said)
			}
			s.judged(t, "alice", "outer.example", fetch, "page of outer.example", true)
		})
	}
	if log := s.ok("egress", "alice"); !strings.Contains(log, "inner.example") {
		t.Errorf("the record does not tell what the inner one was refused: %s", log)
	}
}

// codexNetwork has Codex put its own proxy between a command and the network.
const codexNetwork = `[features]
network_proxy = true
[permissions.net]
extends = ":workspace"
[permissions.net.network]
enabled = true
[permissions.net.network.domains]
"both.example" = "allow"
"inner.example" = "allow"
`

// Codex keeps its model's commands off the network, puts a proxy of its own before it, or
// leaves it to them. Whatever comes out of that goes through ours and is judged there, and
// what Codex closes stays closed.
func TestCodexsNetworkGoesOutThroughOurs(t *testing.T) {
	set := npmSet(t)
	s := newSite(t)
	in, addrs := newInternet(s, "both.example", "inner.example", "outer.example")
	program := filepath.Join(set, "bin", "codex")
	s.write("r/config.json", string(mustJSON(t, object{"runtimes": object{"codex-acp": object{"command": program, "readRoots": []string{set}}}})))
	s.start()
	ca := s.write("ca.pem", in.web(addrs))
	config := s.write("codex/config.toml", codexNetwork)
	path := filepath.Join(set, "bin") + ":/usr/local/bin:/usr/bin:/bin"
	s.ok("agent", "add", "alice", "--runtime", "codex-acp", "--network", "allowlist", "--allow", "both.example", "--allow", "outer.example",
		"--grant", ca+":ro", "--grant", filepath.Dir(config)+":ro", "--env", "PATH="+path)
	// A home of Codex's own for each command; it says that the command ran, whatever that reached.
	under := func(flags, fetch string) string {
		return "export HOST PATH=" + path + "; d=$(mktemp -d $PWD/XXXXXX); mkdir $d/home $d/work; cp " + config + " $d/home; export CODEX_HOME=$d/home; cd $d/work; " +
			"codex sandbox " + flags + " -- sh -c 'echo command ran; " + fetch + "'"
	}
	const proxied = "--include-managed-config -P net"
	fetches := map[string]string{
		"http":   "curl -sS --max-time 30 http://$HOST/",
		"https":  "curl -sS --max-time 30 --cacert " + ca + " https://$HOST/",
		"socks5": "curl -sS --max-time 30 --proxy $ALL_PROXY --cacert " + ca + " https://$HOST/",
	}
	for what, fetch := range fetches {
		t.Run("its proxy, "+what, func(t *testing.T) {
			s.judged(t, "alice", "both.example", under(proxied, fetch), "page of both.example", true)
			s.judged(t, "alice", "inner.example", under(proxied, fetch), "page of inner.example", false)
			s.nowhere(t, "alice", "outer.example", under(proxied, fetch))
		})
		if what == "socks5" {
			continue // there is no proxy
		}
		t.Run("full access, "+what, func(t *testing.T) {
			full := under("-c features.network_proxy=false -c sandbox_mode=workspace-write -c sandbox_workspace_write.network_access=true", fetch)
			s.judged(t, "alice", "both.example", full, "page of both.example", true)
			s.judged(t, "alice", "outer.example", full, "page of outer.example", true)
			s.judged(t, "alice", "inner.example", full, "page of inner.example", false)
		})
	}
	for what, script := range map[string]string{
		"cut off":                     under("-c sandbox_mode=workspace-write", fetches["http"]),
		"cut off by profile":          under("--include-managed-config -P :workspace", fetches["http"]),
		"past its proxy":              under(proxied, "curl -sS --max-time 20 --noproxy \\* http://$HOST/"),
		"past its proxy, its address": under(proxied, "curl -sS --max-time 20 --noproxy \\* http://"+addrs["both.example"]+"/ -H Host:$HOST"),
	} {
		t.Run(what, func(t *testing.T) {
			s.nowhere(t, "alice", "both.example", script)
		})
	}
	// For that it wants a tunnel device, which is not there inside.
	if r := s.sh("alice", "HOST=both.example; "+under(proxied+" --transparent-tcp", fetches["http"])); strings.Contains(r.out, "command ran") {
		t.Errorf("with a tunnel device of its own: exit %d: %s%s", r.code, r.out, r.err)
	}
	log := s.ok("egress", "alice")
	for _, want := range []string{"allowed both.example:443 at " + addrs["both.example"], "allowed outer.example:80 at " + addrs["outer.example"], "denied  name inner.example"} {
		if !strings.Contains(log, want) {
			t.Errorf("the record lacks %q: %s", want, log)
		}
	}
}

// nowhere runs a script for a host: inside and outside it must run, and reach nothing.
func (s *site) nowhere(t *testing.T, id, host, script string) {
	t.Helper()
	r := s.sh(id, "HOST="+host+"; "+script)
	o := s.finish(s.command(t.Context(), "/bin/sh", "-c", "cd "+s.mkdir("outside")+"; HOST="+host+"; "+script))
	for where, r := range map[string]result{"inside": r, "outside": o} {
		if !strings.Contains(r.out, "command ran") || strings.Contains(r.out, "page of") {
			t.Errorf("%s, %s: exit %d: %s%s", host, where, r.code, r.out, r.err)
		}
	}
}

// What an agent used is counted and recorded, and the rules made of it are enough for another
// one, and for nothing else.
func TestWhatWasUsedIsCountedAndSuggestedAndIsEnough(t *testing.T) {
	s := newSite(t)
	in, addrs := newInternet(s, "one.example", "two.example", "three.example")
	s.start()
	in.web(addrs)
	s.add("alice", "--network", "open", "--deny", "three.example")
	s.ok("agent", "start", "alice")
	get := "curl -sSk --max-time 20 http://$HOST/"
	tls := "curl -sSk --max-time 20 https://$HOST/"
	s.judged(t, "alice", "one.example", get, "page of one.example", true)
	s.judged(t, "alice", "two.example", tls, "page of two.example", true)
	s.judged(t, "alice", "three.example", get, "page of three.example", false)
	var st string
	s.until("status counts them", func() bool {
		st = s.ok("status")
		return strings.Contains(st, "egress 2 allowed 1 denied")
	})
	for _, want := range []string{"allowed one.example:80 at " + addrs["one.example"], "allowed two.example:443 at " + addrs["two.example"], "denied  name three.example by the rule three.example"} {
		if log := s.ok("egress", "alice"); !strings.Contains(log, want) {
			t.Errorf("the record lacks %q: %s", want, log)
		}
	}
	flags := []string{"--network", "allowlist"}
	for rule := range strings.Lines(s.ok("egress", "alice", "--suggest")) {
		flags = append(flags, "--allow", strings.TrimSpace(rule))
	}
	s.add("bob", flags...)
	s.judged(t, "bob", "one.example", get, "page of one.example", true)
	s.judged(t, "bob", "two.example", tls, "page of two.example", true)
	s.judged(t, "bob", "one.example", tls, "page of one.example", false)
	s.judged(t, "bob", "three.example", get, "page of three.example", false)
}
