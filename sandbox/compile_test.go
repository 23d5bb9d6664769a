package sandbox

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write the golden files anew")

func golden(t *testing.T, name string, v any) {
	t.Helper()
	got, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, '\n')
	path := filepath.Join("testdata", name+".json")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

func TestPlansAreGolden(t *testing.T) {
	for name, change := range map[string]func(*Policy, *memHost){
		"default": func(*Policy, *memHost) {},
		"workspace-and-grants": func(p *Policy, h *memHost) {
			p.Workspace = "/home/alice/src/app"
			p.Grants = []Grant{{"/home/alice/.cache/pip", ReadWrite}, {"/home/alice/src/lib", ReadOnly}, {"/home/alice/src/app/.git", ReadOnly}}
			p.Expose = []string{"/home/alice/.local/share/tool"}
		},
		"read-host": func(p *Policy, h *memHost) {
			p.Read, p.Network = ReadHost, NetworkHost
			h.dir("/data/project")
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, h := alice(), debian()
			change(&p, h)
			plan, err := Compile(p, h)
			if err != nil {
				t.Fatal(err)
			}
			golden(t, name, plan)
			golden(t, name+"-bwrap", plan.BwrapArgs("/tmp", "/w", 7, 8))
		})
	}
}

func mustCompile(t *testing.T, p Policy, h Host) *Plan {
	t.Helper()
	plan, err := Compile(p, h)
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

func TestExplainSaysWhatTheViewShows(t *testing.T) {
	p, h := alice(), debian()
	p.Grants = []Grant{{"/home/alice/src/app", ReadWrite}, {"/home/alice/src/app/.git", ReadOnly}, {"/srv", ReadOnly}}
	h.dir("/srv/data")
	for _, read := range []ReadMode{ReadSystem, ReadHost} {
		p.Read = read
		plan := mustCompile(t, p, h)
		for path, want := range map[string]Access{
			"/usr/bin/env": ReadOnly, "/bin/sh": ReadOnly, "/etc/passwd": ReadOnly, "/etc/resolv.conf": ReadOnly,
			"/home/alice/src/app/main.go": ReadWrite, "/home/alice/src/app/.git/hooks/pre-commit": ReadOnly,
			"/home/alice/.bashrc": ReadWrite, // the private home's own, not the user's
			"/tmp/x":              ReadWrite, "/var/tmp/x": ReadWrite, "/run/user/1000/x": ReadWrite,
			"/run/agentconnect/guest":                         ReadOnly,
			"/home/alice/.agentconnect/agents/a1/workspace/x": ReadWrite, "/home/alice/.agentconnect/agents/a1/memory/x": ReadWrite,
			"/home/bob/x": Hidden, "/root/x": Hidden, "/srv/data": ReadOnly,
		} {
			if got := plan.Explain(path).Access; got != want {
				t.Errorf("read %s: %s is %s, want %s", read, path, got, want)
			}
		}
		// What the private home shows at these paths comes from the private home.
		for _, path := range []string{"/home/alice/.ssh/id", "/home/alice/.agentconnect/config.json", "/home/alice/.agentconnect/agents/a2/agent.json", "/home/alice/.agentconnect/agents/a1/agent.json", "/home/alice/.bashrc"} {
			if v := plan.Explain(path); !strings.HasPrefix(v.Source, p.HomeDir+"/") {
				t.Errorf("read %s: %s comes from %q", read, path, v.Source)
			}
		}
	}
	p.Read = ReadSystem
	if got := mustCompile(t, p, h).Explain("/etc/shadow").Access; got != Hidden {
		t.Errorf("/etc/shadow is %s", got)
	}
}

func TestGrantedInsideHiddenAndHiddenInsideGranted(t *testing.T) {
	p, h := alice(), debian()
	h.dir("/srv/shared/home/carol/secret", "/srv/shared/data")
	p.Read = ReadHost
	p.OtherHomes = append(p.OtherHomes, "/srv/shared/home/carol")
	p.Grants = []Grant{{"/srv/shared/data", ReadWrite}, {"/home/bob", ReadOnly}}
	h.dir("/home/bob/pub")
	p.Grants[1].Path = "/home/bob/pub"
	for range 2 {
		plan, err := Compile(p, h)
		if err == nil {
			if v := plan.Explain("/srv/shared/home/carol/secret"); v.Access != Hidden {
				t.Errorf("a hidden directory inside a readable one is %s", v.Access)
			}
			if v := plan.Explain("/srv/shared/data/x"); v.Access != ReadWrite {
				t.Errorf("a grant is %s", v.Access)
			}
			if v := plan.Explain("/home/bob/pub/x"); v.Access != ReadOnly {
				t.Errorf("a grant inside a hidden home is %s", v.Access)
			}
			if v := plan.Explain("/home/bob/other"); v.Access != Hidden {
				t.Errorf("beside a grant inside a hidden home: %s", v.Access)
			}
		} else {
			t.Fatal(err)
		}
		slices.Reverse(p.Grants)
	}
}

func TestRefusedGrantsSayWhy(t *testing.T) {
	p, h := alice(), debian()
	h.link("/home/alice/to-src", "src").link("/home/alice/to-ssh", ".ssh").link("/srv/to-root", "/").link("/srv/to-agents", "/home/alice/.agentconnect/agents").socket("/srv/s.sock")
	h.dir("/usr/share")
	for path, reason := range map[string]string{
		"/": "whole file system", "/srv/to-root": "whole file system", "/etc": "belongs to the system", "/usr/share": "belongs to the system", "/usr": "belongs to the system",
		"/var": "system", "/tmp": "shared by the whole system", "/home": "holds the home", "/home/alice": "whole home", "/home/alice/.": "whole home",
		"/home/alice/.agentconnect": "agents' own", "/home/alice/.agentconnect/agents/a2/workspace": "agents' own", "/srv/to-agents": "agents' own",
		"/home/alice/.ssh": "ssh keys", "/home/alice/to-ssh": "ssh keys", "/home/alice/.config": "holds the place of", "/home/alice/.config/systemd/user": "runs on the host",
		"/home/alice/.local/bin": "run on the host", "/home/alice/.bashrc": "shell runs it", "relative": "not absolute", "/srv/s.sock": "neither a directory", "/srv/\x00": "NUL",
		"/run/user/1000": "belongs to the system", "/proc/self": "does not exist", "/home/alice/none": "does not exist", "/home/alice/src/../.ssh": "ssh keys", "/home/alice/to-src": "give /home/alice/src itself",
	} {
		err := CheckGrant(p, path, ReadWrite, h)
		if err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("grant %q: %v, want an error with %q", path, err, reason)
		}
	}
	for _, path := range []string{"/home/alice/src/app", "/srv", "/home/alice/.cache/pip", "/opt/x", "/home/bob"} {
		h.dir("/opt/x")
		if err := CheckGrant(p, path, ReadWrite, h); err != nil && path != "/home/bob" {
			t.Errorf("grant %q: %v", path, err)
		}
	}
}

func TestWorkspaceStaysInsideOrIsAGrant(t *testing.T) {
	h := debian()
	dir := "/home/alice/.agentconnect/agents/a1"
	h.link(dir+"/away", "/home/alice/src/app").link(dir+"/self", ".").link(dir+"/up", "../a2/workspace").link("/home/alice/lnk", "src/app")
	for ws, reason := range map[string]string{
		"away": "must stay inside the agent directory", "self": "agent directory itself", ".": "agent directory itself", "..": "must stay inside", "../a2/workspace": "must stay inside",
		"up": "must stay inside", "home": "overlaps", "memory": "overlaps", "missing": "does not exist", "/": "whole file system", "/home/alice": "whole home", dir: "agent directory itself", dir + "/tmp": "overlaps",
		"/home/alice/.ssh": "ssh keys", "agent.json": "not a directory",
	} {
		p := alice()
		p.Workspace = ws
		if _, err := Compile(p, h); err == nil || !strings.Contains(err.Error(), reason) {
			if ws == "missing" && errors.Is(err, os.ErrNotExist) {
				continue
			}
			t.Errorf("workspace %q: %v, want %q", ws, err, reason)
		}
	}
	p := alice()
	p.Workspace = "/home/alice/lnk"
	if _, err := Compile(p, h); err == nil || !strings.Contains(err.Error(), "give /home/alice/src/app itself") {
		t.Errorf("a workspace behind a link: %v", err)
	}
}

// An agent that may write above a grant can put a link in its place: the next start must
// not follow it.
func TestGrantThatBecameALinkIsRefused(t *testing.T) {
	for _, what := range []string{"grant", "workspace"} {
		p, h := alice(), debian()
		h.dir("/home/alice/src/lib", "/home/alice/Documents/secret")
		p.Grants = []Grant{{"/home/alice/src", ReadWrite}}
		if what == "grant" {
			p.Grants = append(p.Grants, Grant{"/home/alice/src/lib", ReadWrite})
		} else {
			p.Workspace = "/home/alice/src/lib"
		}
		plan := mustCompile(t, p, h)
		if !slices.ContainsFunc(plan.Mounts, func(m Mount) bool { return m.Op == OpBind && m.Target == "/home/alice/src/lib" }) {
			t.Errorf("the %s inside a writable folder is no mount point of its own: it could be renamed", what)
		}
		delete(h.nodes, "/home/alice/src/lib")
		h.link("/home/alice/src/lib", "/home/alice/Documents/secret")
		var refused *RefusedError
		if _, err := Compile(p, h); !errors.As(err, &refused) {
			t.Errorf("the %s became a link: %v", what, err)
		}
	}
}

func TestOurOwnProgramsAndSocketsCannotBeOpened(t *testing.T) {
	p, h := alice(), debian()
	h.dir("/home/alice/checkout/bin", "/home/alice/run/agentconnect").file("/home/alice/other-root/daemon.lock", "").dir("/home/alice/other-root/agents")
	p.Own = []string{"/home/alice/checkout/bin", "/home/alice/run"}
	for path, access := range map[string]Access{
		"/home/alice/checkout": ReadWrite, "/home/alice/checkout/bin": ReadOnly, "/home/alice/run": ReadOnly, "/home/alice/run/agentconnect": ReadOnly,
		"/home/alice/other-root": ReadOnly, "/home/alice/other-root/agents": ReadWrite,
	} {
		var refused *RefusedError
		if err := CheckGrant(p, path, access, h); !errors.As(err, &refused) {
			t.Errorf("%s:%s: %v", path, access, err)
		}
	}
	if err := CheckGrant(p, "/home/alice/checkout", ReadOnly, h); err != nil {
		t.Errorf("to read the checkout: %v", err)
	}
}

func TestWritableGrantAboveWhatDoesNotExistYet(t *testing.T) {
	p, h := alice(), newMemHost()
	h.dir("/home/alice/.config", "/home/alice/.local/share", "/home/alice/.cache")
	for path, refused := range map[string]bool{"/home/alice/.config": true, "/home/alice/.local": true, "/home/alice/.local/share": true, "/home/alice/.cache": false} {
		if err := CheckGrant(p, path, ReadWrite, h); (err != nil) != refused {
			t.Errorf("%s:rw: %v", path, err)
		}
		if err := CheckGrant(p, path, ReadOnly, h); err != nil {
			t.Errorf("%s:ro, with nothing of that kind in it: %v", path, err)
		}
	}
}

func TestVanishedSocketLosesNoStart(t *testing.T) {
	p, h := alice(), debian()
	p.Workspace = "/home/alice/src/app"
	h.socket("/home/alice/src/app/s")
	gone := vanishing{h}
	if _, err := Compile(p, gone); err != nil {
		t.Error(err)
	}
}

// vanishing is a host where a socket is gone when it is looked at a second time.
type vanishing struct{ *memHost }

func (v vanishing) Resolve(path string) (string, Kind, error) {
	real, kind, err := v.memHost.Resolve(path)
	if kind == KindSocket {
		delete(v.nodes, real)
	}
	return real, kind, err
}

func TestTooManySocketsAreRefused(t *testing.T) {
	p, h := alice(), debian()
	p.Workspace = "/home/alice/src/app"
	for i := range maxCovers + 1 {
		h.socket("/home/alice/src/app/s" + strconv.Itoa(i))
	}
	if _, err := Compile(p, h); err == nil || !strings.Contains(err.Error(), "sockets") {
		t.Errorf("%v", err)
	}
}

func TestRootBelowAnExposedTreeIsHidden(t *testing.T) {
	p, h := alice(), debian()
	for _, d := range []string{"home", "tmp", "memory", "workspace"} {
		h.dir("/opt/ac/agents/a1/" + d)
	}
	h.file("/opt/ac/agents/a2/agent.json", "{}")
	p.Root, p.AgentDir = "/opt/ac", "/opt/ac/agents/a1"
	p.HomeDir, p.TmpDir, p.MemoryDir = p.AgentDir+"/home", p.AgentDir+"/tmp", p.AgentDir+"/memory"
	plan := mustCompile(t, p, h)
	if v := plan.Explain("/opt/ac/agents/a2/agent.json"); v.Access != Hidden {
		t.Errorf("%+v", v)
	}
	if v := plan.Explain("/opt/ac/agents/a1/workspace/x"); v.Access != ReadWrite {
		t.Errorf("%+v", v)
	}
}

func TestAgentDirectoryPartsBehindLinksAreJudged(t *testing.T) {
	dir := "/home/alice/.agentconnect/agents/a1"
	for _, part := range []string{"home", "tmp", "memory"} {
		h := debian()
		delete(h.nodes, dir+"/"+part)
		h.link(dir+"/"+part, "/home/alice/.ssh")
		var refused *RefusedError
		if _, err := Compile(alice(), h); !errors.As(err, &refused) {
			t.Errorf("%s is a link to ~/.ssh: %v", part, err)
		}
	}
}

func TestMissingGrantLeavesNothingBehind(t *testing.T) {
	p, h := alice(), debian()
	p.Grants = []Grant{{"/home/alice/not-yet", ReadWrite}}
	plan := mustCompile(t, p, h)
	if v := plan.Explain("/home/alice/not-yet/x"); !strings.HasPrefix(v.Source, p.HomeDir) {
		t.Errorf("a missing grant leads to %q", v.Source)
	}
	if !slices.ContainsFunc(plan.Notes, func(n string) bool { return strings.Contains(n, "/home/alice/not-yet") }) {
		t.Errorf("notes do not name the missing grant: %q", plan.Notes)
	}
}

func TestHostSocketsInExposedTreesAreCovered(t *testing.T) {
	p, h := alice(), debian()
	p.Workspace = "/home/alice/src/app"
	h.socket("/home/alice/src/app/run/dev.sock").socket("/usr/lib/odd.sock").socket("/run/user/1000/bus").socket("/home/alice/.ssh/agent")
	plan := mustCompile(t, p, h)
	for path, covered := range map[string]bool{"/home/alice/src/app/run/dev.sock": true, "/usr/lib/odd.sock": true, "/run/user/1000/bus": false} {
		got := slices.ContainsFunc(plan.Mounts, func(m Mount) bool { return m.Op == OpCover && m.Target == path })
		if got != covered {
			t.Errorf("%s covered: %v, want %v", path, got, covered)
		}
	}
	if !slices.ContainsFunc(plan.Mounts, func(m Mount) bool { return m.Pinned && m.Target == "/home/alice/src/app/run" }) {
		t.Error("the directory of a covered socket in the workspace is not pinned")
	}
}

func TestResolvConfBehindLinks(t *testing.T) {
	for name, c := range map[string]struct {
		host func(*memHost)
		text string
		note bool
	}{
		"link into run": {func(*memHost) {}, "nameserver 127.0.0.53", false},
		"chain": {func(h *memHost) {
			h.link("/etc/resolv.conf", "resolv.link").link("/etc/resolv.link", "/run/resolv.real").file("/run/resolv.real", "nameserver 9.9.9.9\n")
		}, "nameserver 9.9.9.9", false},
		"dangling": {func(h *memHost) { h.link("/etc/resolv.conf", "/run/none") }, "cannot be read", true},
	} {
		for _, read := range []ReadMode{ReadSystem, ReadHost} {
			t.Run(name+" "+string(read), func(t *testing.T) {
				p, h := alice(), debian()
				c.host(h)
				p.Network, p.Read = NetworkHost, read
				plan := mustCompile(t, p, h)
				found := slices.ContainsFunc(plan.Mounts, func(m Mount) bool { return strings.Contains(m.Content, c.text) })
				if !found || c.note != (len(plan.Notes) > 0) {
					t.Errorf("content found: %v, notes: %q", found, plan.Notes)
				}
			})
		}
	}
}

func TestUserFromADirectoryServiceIsInPasswd(t *testing.T) {
	p, h := alice(), debian()
	h.file("/etc/passwd", "root:x:0:0:root:/root:/bin/bash")
	plan := mustCompile(t, p, h)
	i := slices.IndexFunc(plan.Mounts, func(m Mount) bool { return m.Target == "/etc/passwd" })
	if i < 0 || !strings.Contains(plan.Mounts[i].Content, "\nalice:x:1000:1000::/home/alice:") {
		t.Errorf("passwd: %+v", plan.Mounts[i])
	}
}

func TestGatedNetworkAsksOurServerAndKeepsTheSearchList(t *testing.T) {
	for _, mode := range []NetworkMode{NetworkAllowlist, NetworkOpen} {
		p, h := alice(), debian()
		p.Network = mode
		h.file("/etc/resolv.conf", "domain old.example\nnameserver 10.0.0.53\nsearch corp.example  example.org\noptions ndots:5\n")
		plan := mustCompile(t, p, h)
		i := slices.IndexFunc(plan.Mounts, func(m Mount) bool { return m.Target == "/etc/resolv.conf" })
		if i < 0 {
			t.Fatal("no resolv.conf")
		}
		text := plan.Mounts[i].Content
		if !strings.Contains(text, "\nnameserver "+GatewayIPv4+"\nsearch corp.example example.org\n") || strings.Contains(text, "10.0.0.53") || strings.Contains(text, "ndots") {
			t.Errorf("%s: %q", mode, text)
		}
	}
}

func TestUnknownNetworkModesAreErrors(t *testing.T) {
	for _, mode := range []NetworkMode{"", "full"} {
		p := alice()
		p.Network = mode
		if plan, err := Compile(p, debian()); err == nil {
			t.Errorf("mode %q compiled: %+v", mode, plan.Network)
		}
	}
}

func TestRuntimeInstallationCannotOpenTheHome(t *testing.T) {
	for _, path := range []string{"/home/alice", "/home", "/", "/home/alice/.ssh", "/home/alice/.agentconnect/agents/a2", "/home/alice/.agentconnect"} {
		p := alice()
		p.Expose = []string{path}
		var refused *RefusedError
		if _, err := Compile(p, debian()); !errors.As(err, &refused) {
			t.Errorf("exposing %s: %v", path, err)
		}
	}
}

// model is the simplest reading of the rules: the longest path that holds q decides, and
// of equal ones the stricter.
type model map[string]Access

func (m model) add(path string, a Access) {
	if old, ok := m[path]; !ok || strictness(a) > strictness(old) {
		m[path] = a
	}
}

func (m model) at(q string) Access {
	for dir := q; ; dir = filepath.Dir(dir) {
		if a, ok := m[dir]; ok {
			return a
		}
		if dir == "/" {
			return Hidden
		}
	}
}

// kernel is what a mount namespace does: of the mounts in order, the last one whose
// target holds the path shows it.
func kernel(p *Plan, q string) (source string, access Access) {
	access = Hidden
	for _, m := range p.Mounts {
		if m.mounts() && inside(q, m.Target) {
			access, source = m.Access, ""
			if m.Op == OpBind {
				source = filepath.Join(m.Source, strings.TrimPrefix(q, m.Target))
			}
		}
	}
	return source, access
}

func TestRandomPoliciesAgreeWithTheModel(t *testing.T) {
	names := []string{"a", "b", "c", "d e"}
	rapid.Check(t, func(t *rapid.T) {
		h := debian()
		var dirs []string
		for range rapid.IntRange(1, 12).Draw(t, "dirs") {
			base := rapid.SampledFrom([]string{"/home/alice/src", "/srv", "/data"}).Draw(t, "base")
			for range rapid.IntRange(1, 4).Draw(t, "depth") {
				base += "/" + rapid.SampledFrom(names).Draw(t, "name")
			}
			h.dir(base)
			dirs = append(dirs, base)
		}
		p := alice()
		p.Read = rapid.SampledFrom([]ReadMode{ReadSystem, ReadHost}).Draw(t, "read")
		m := model{}
		if p.Read == ReadHost {
			m.add("/data", ReadOnly)
			m.add("/srv", ReadOnly)
		}
		m.add("/home/alice", ReadWrite)
		for _, d := range dirs {
			switch rapid.IntRange(0, 3).Draw(t, "rule") {
			case 0:
				p.Grants = append(p.Grants, Grant{d, ReadWrite})
				m.add(d, ReadWrite)
			case 1:
				p.Grants = append(p.Grants, Grant{d, ReadOnly})
				m.add(d, ReadOnly)
			case 2:
				if p.Read == ReadHost && !strings.HasPrefix(d, "/home") {
					p.OtherHomes = append(p.OtherHomes, d)
					m.add(d, Hidden)
				}
			}
		}
		plan, err := Compile(p, h)
		if err != nil {
			var refused *RefusedError
			if errors.As(err, &refused) {
				t.Skip("a grant above another home is refused")
			}
			t.Fatalf("%v", err)
		}
		other := p
		other.Grants = rapid.Permutation(p.Grants).Draw(t, "order")
		again, err := Compile(other, h)
		if err != nil {
			t.Fatalf("in another order: %v", err)
		}
		if diff := cmp.Diff(plan.Mounts, again.Mounts, cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".Why" }, cmp.Ignore())); diff != "" {
			t.Fatalf("the order of rules matters:\n%s", diff)
		}
		for _, d := range append(dirs, "/home/alice/.ssh", "/home/alice/.agentconnect/agents/a2", "/home/bob", "/srv/zz", "/etc/shadow") {
			for _, q := range []string{d, d + "/below", filepath.Dir(d)} {
				if inside(q, "/etc") && p.Read == ReadHost || q == "/" || q == "/home" {
					continue
				}
				want := m.at(q)
				source, got := kernel(plan, q)
				if got != want {
					t.Fatalf("%s is %s in the view, %s in the model\n%+v", q, got, want, p.Grants)
				}
				if inside(source, p.Root) && !inside(source, p.HomeDir) && !inside(source, p.TmpDir) && !inside(source, p.MemoryDir) && !inside(source, p.AgentDir+"/workspace") {
					t.Fatalf("%s shows %s, which is hidden", q, source)
				}
				if inside(source, "/home/alice/.ssh") || inside(source, "/home/bob") {
					t.Fatalf("%s shows %s, which is hidden", q, source)
				}
				if e := plan.Explain(q).Access; e != want && !(want == Hidden && e == ReadOnly) {
					t.Fatalf("explain says %s of %s, the model %s", e, q, want)
				}
			}
		}
	})
}

func TestPinsStandBetweenAWritableMountAndWhatLiesBelow(t *testing.T) {
	p, h := alice(), debian()
	h.dir("/srv/w/x/y/sealed")
	p.Grants = []Grant{{"/srv/w", ReadWrite}, {"/srv/w/x/y/sealed", ReadOnly}}
	plan := mustCompile(t, p, h)
	for _, dir := range []string{"/srv/w/x", "/srv/w/x/y"} {
		if !slices.ContainsFunc(plan.Mounts, func(m Mount) bool { return m.Pinned && m.Target == dir && m.Access == ReadWrite }) {
			t.Errorf("%s is not pinned", dir)
		}
	}
}

// Generated files are what the agent sees, in every read mode, and what else lies beside them
// on the host stays.
func TestGeneratedFilesStandInPlaceOfTheHosts(t *testing.T) {
	for _, mode := range []ReadMode{ReadSystem, ReadHost} {
		t.Run(string(mode), func(t *testing.T) {
			h := debian().file("/etc/tool/policy.json", "loose").file("/etc/tool/other", "").file("/etc/app.conf", "").link("/etc/mtab", "../proc/self/mounts")
			p := alice()
			p.Read = mode
			p.Files = []File{{Path: "/etc/tool/policy.json", Content: "strict", Why: "ours"}, {Path: "/home/alice/.tool/settings.json", Content: "{}", Why: "ours"}}
			plan, err := Compile(p, h)
			if err != nil {
				t.Fatal(err)
			}
			for path, want := range map[string]string{"/etc/tool/policy.json": "strict", "/home/alice/.tool/settings.json": "{}"} {
				if v := plan.Explain(path); v.Access != ReadOnly || v.Why != "ours" {
					t.Errorf("%s: %+v", path, v)
				}
				if i := slices.IndexFunc(plan.Mounts, func(m Mount) bool { return m.Target == path }); i < 0 || plan.Mounts[i].Content != want {
					t.Errorf("%s: %+v", path, plan.Mounts)
				}
			}
			pinned := slices.ContainsFunc(plan.Mounts, func(m Mount) bool { return m.Target == "/home/alice/.tool" && m.Pinned })
			if !pinned {
				t.Error("the folder of the file in the home can be moved away")
			}
			if mode == ReadHost {
				for _, path := range []string{"/etc/tool/other", "/etc/app.conf", "/etc/passwd"} {
					if v := plan.Explain(path); v.Access != ReadOnly || v.Source != path {
						t.Errorf("%s: %+v", path, v)
					}
				}
				if v := plan.Explain("/etc/resolv.conf"); v.Access != ReadOnly || v.Why != "generated" {
					t.Errorf("resolv.conf: %+v", v)
				}
			}
		})
	}
	for _, path := range []string{"etc/x", "/etc/../x", "/usr/x", "/etc", "/home/alice", "/home/alicex/y"} {
		p := alice()
		p.Files = []File{{Path: path}}
		if _, err := Compile(p, debian()); err == nil {
			t.Errorf("%s: no error", path)
		}
	}
}
