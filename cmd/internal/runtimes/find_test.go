package runtimes

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// host is a made-up home with programs in it.
type host struct {
	t    *testing.T
	home string
}

func newHost(t *testing.T) *host {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t, filepath.Join(dir, "home", "jo")}
	h.dir(".agentconnect")
	return h
}

func (h *host) path(p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(h.home, p)
}

func (h *host) dir(p string) {
	h.t.Helper()
	if err := os.MkdirAll(h.path(p), 0o755); err != nil {
		h.t.Fatal(err)
	}
}

// file writes a program; HOME in it stands for the home.
func (h *host) file(p, content string) {
	h.t.Helper()
	h.dir(filepath.Dir(h.path(p)))
	if err := os.WriteFile(h.path(p), []byte(strings.ReplaceAll(content, "HOME", h.home)), 0o755); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) link(target, p string) {
	h.t.Helper()
	h.dir(filepath.Dir(h.path(p)))
	if err := os.Symlink(strings.ReplaceAll(target, "HOME", h.home), h.path(p)); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) options() Options {
	return Options{Name: "x", Home: h.home, Root: h.path(".agentconnect"), Path: "/usr/bin:/bin"}
}

// relative writes paths of an installation with HOME for the home.
func (h *host) relative(in Installation) Installation {
	r := func(s string) string { return strings.ReplaceAll(s, h.home, "HOME") }
	in.Program, in.Argv0 = r(in.Program), r(in.Argv0)
	for _, list := range [][]string{in.Args, in.Expose, in.PathDirs} {
		for i := range list {
			list[i] = r(list[i])
		}
	}
	return in
}

const (
	elfText = "\x7fELF not really"
	pnpm    = `#!/bin/sh
basedir=$(dirname "$(echo "$0" | sed -e 's,\\,/,g')")

case ` + "`uname`" + ` in
    *CYGWIN*|*MINGW*|*MSYS*) basedir=` + "`cygpath -w \"$basedir\"`" + `;;
esac

if [ -z "$NODE_PATH" ]; then
  export NODE_PATH="HOME/.local/share/pnpm/global/5/.pnpm/tool@1/node_modules"
fi
if [ -x "$basedir/node" ]; then
  exec "$basedir/node"  "$basedir/global/5/node_modules/tool/dist/index.js" "$@"
else
  exec node  "$basedir/global/5/node_modules/tool/dist/index.js" "$@"
fi
`
)

func TestInstallationsWhereverTheyLive(t *testing.T) {
	const modules = "HOME/.npm-global/lib/node_modules"
	tests := []struct {
		name    string
		make    func(h *host)
		program string // "tool" if empty
		want    Installation
	}{
		{
			name: "npm prefix with its own node",
			make: func(h *host) {
				h.file(".npm-global/lib/node_modules/tool/dist/index.js", "#!/usr/bin/env node\n")
				h.file(".npm-global/lib/node_modules/node/bin/node", elfText)
				h.link("../lib/node_modules/tool/dist/index.js", ".npm-global/bin/tool")
				h.link("../lib/node_modules/node/bin/node", ".npm-global/bin/node")
				h.file(".local/bin/node", elfText) // earlier in the search, but not beside
			},
			want: Installation{Program: "HOME/.npm-global/bin/tool", Argv0: modules + "/tool/dist/index.js",
				Expose: []string{modules}, PathDirs: []string{modules + "/node/bin"}},
		},
		{
			name: "link in ~/.local/bin into ~/.local/share",
			make: func(h *host) {
				h.file(".local/share/tool/bin/tool", elfText)
				h.file(".local/share/tool/auth.json", "secret")
				h.link("../share/tool/bin/tool", ".local/bin/tool")
			},
			want: Installation{Program: "HOME/.local/bin/tool", Argv0: "HOME/.local/share/tool/bin/tool",
				Expose: []string{"HOME/.local/share/tool/bin/tool"}},
		},
		{
			name: "script in ~/.local/share with its libraries",
			make: func(h *host) {
				h.file(".local/share/tool/bin/tool", "#!/usr/bin/python3\n")
				h.file(".local/share/tool/lib/tool.py", "")
				h.file(".local/share/tool/auth.json", "secret")
				h.link("HOME/.local/share/tool/bin/tool", ".local/bin/tool")
			},
			want: Installation{Program: "HOME/.local/bin/tool", Argv0: "HOME/.local/share/tool/bin/tool",
				Expose: []string{"HOME/.local/share/tool/bin", "HOME/.local/share/tool/lib"}},
		},
		{
			name: "binary in ~/.local/bin itself",
			make: func(h *host) { h.file(".local/bin/tool", elfText); h.file(".local/bin/other", elfText) },
			want: Installation{Program: "HOME/.local/bin/tool", Argv0: "HOME/.local/bin/tool",
				Expose: []string{"HOME/.local/bin/tool"}},
		},
		{
			name: "script in ~/.local/bin: only the file",
			make: func(h *host) { h.file(".local/bin/tool", "#!/usr/bin/perl\n"); h.file(".local/bin/other", elfText) },
			want: Installation{Program: "HOME/.local/bin/tool", Argv0: "HOME/.local/bin/tool",
				Expose: []string{"HOME/.local/bin/tool"}},
		},
		{
			name:    "script in the home itself: only the file",
			make:    func(h *host) { h.file("tool", "#!/usr/bin/perl\n"); h.file("secret", "s") },
			program: "HOME/tool",
			want: Installation{Program: "HOME/tool", Argv0: "HOME/tool",
				Expose: []string{"HOME/tool"}},
		},
		{
			name: "nvm, the newest version first",
			make: func(h *host) {
				for _, v := range []string{"v9.0.0", "v22.1.0"} {
					p := ".nvm/versions/node/" + v
					h.file(p+"/bin/node", elfText)
					h.file(p+"/include/node/node.h", "")
					h.file(p+"/lib/node_modules/tool/index.js", "#!/usr/bin/env node\n")
					h.link("../lib/node_modules/tool/index.js", p+"/bin/tool")
				}
			},
			want: Installation{Program: "HOME/.nvm/versions/node/v22.1.0/bin/tool",
				Argv0: "HOME/.nvm/versions/node/v22.1.0/lib/node_modules/tool/index.js",
				Expose: []string{
					"HOME/.nvm/versions/node/v22.1.0/bin", "HOME/.nvm/versions/node/v22.1.0/include",
					"HOME/.nvm/versions/node/v22.1.0/lib",
				},
				PathDirs: []string{"HOME/.nvm/versions/node/v22.1.0/bin"}},
		},
		{
			name: "pnpm shim",
			make: func(h *host) {
				h.file(".local/share/pnpm/tool", pnpm)
				h.file(".local/share/pnpm/other", pnpm)
				h.file(".local/share/pnpm/global/5/node_modules/.pnpm/tool@1/node_modules/tool/dist/index.js", "#!/usr/bin/env node\n")
				h.link(".pnpm/tool@1/node_modules/tool", ".local/share/pnpm/global/5/node_modules/tool")
				h.file(".local/share/pnpm/node", elfText) // as `pnpm env` puts it
			},
			want: Installation{Program: "HOME/.local/share/pnpm/tool", Argv0: "HOME/.local/share/pnpm/tool",
				Expose:   []string{"HOME/.local/share/pnpm/global/5/node_modules", "HOME/.local/share/pnpm/node", "HOME/.local/share/pnpm/tool"},
				PathDirs: []string{"HOME/.local/share/pnpm"}},
		},
		{
			name: "pnpm add -g: its store lies beside node_modules",
			make: func(h *host) {
				h.file(".local/share/pnpm/tool", pnpm)
				h.file(".local/share/pnpm/global/5/.pnpm/tool@1/node_modules/tool/dist/index.js", "#!/usr/bin/env node\n")
				h.file(".local/share/pnpm/global/5/.pnpm/dep@1/node_modules/dep/index.js", "")
				h.link("../../dep@1/node_modules/dep", ".local/share/pnpm/global/5/.pnpm/tool@1/node_modules/dep")
				h.link("../.pnpm/tool@1/node_modules/tool", ".local/share/pnpm/global/5/node_modules/tool")
				h.file(".local/share/pnpm/node", elfText)
			},
			want: Installation{Program: "HOME/.local/share/pnpm/tool", Argv0: "HOME/.local/share/pnpm/tool",
				Expose: []string{"HOME/.local/share/pnpm/global/5/.pnpm", "HOME/.local/share/pnpm/global/5/node_modules",
					"HOME/.local/share/pnpm/node", "HOME/.local/share/pnpm/tool"},
				PathDirs: []string{"HOME/.local/share/pnpm"}},
		},
		{
			name: "pnpm's global virtual store",
			make: func(h *host) {
				h.file(".local/share/pnpm/store/v10/links/tool/1/abc/node_modules/tool/index.js", "#!/usr/bin/perl\n")
				h.link("HOME/.local/share/pnpm/store/v10/links/tool/1/abc/node_modules/tool/index.js", ".local/share/pnpm/tool")
			},
			want: Installation{Program: "HOME/.local/share/pnpm/tool",
				Argv0:  "HOME/.local/share/pnpm/store/v10/links/tool/1/abc/node_modules/tool/index.js",
				Expose: []string{"HOME/.local/share/pnpm/store/v10/links"}},
		},
		{
			name: "Python venv",
			make: func(h *host) {
				h.file(".local/share/tool-venv/pyvenv.cfg", "home = /usr/bin\n")
				h.file(".local/share/tool-venv/bin/tool", "#!HOME/.local/share/tool-venv/bin/python\n")
				h.link("/bin/true", ".local/share/tool-venv/bin/python")
				h.link("HOME/.local/share/tool-venv/bin/tool", ".local/bin/tool")
			},
			want: Installation{Program: "HOME/.local/bin/tool", Argv0: "HOME/.local/share/tool-venv/bin/tool",
				Expose: []string{"HOME/.local/share/tool-venv"}},
		},
		{
			name: "uv tool: venv over uv's own Python, by a chain of links",
			make: func(h *host) {
				h.file(".local/share/uv/python/cpython-3.12.5/bin/python3.12", elfText)
				h.link("cpython-3.12.5", ".local/share/uv/python/cpython-3.12")
				h.file(".local/share/uv/tools/tool/pyvenv.cfg", "home = HOME/.local/share/uv/python/cpython-3.12/bin\n")
				h.link("HOME/.local/share/uv/python/cpython-3.12/bin/python3.12", ".local/share/uv/tools/tool/bin/python")
				h.file(".local/share/uv/tools/tool/bin/tool", "#!HOME/.local/share/uv/tools/tool/bin/python\n")
				h.link("HOME/.local/share/uv/tools/tool/bin/tool", ".local/bin/tool")
			},
			want: Installation{Program: "HOME/.local/bin/tool", Argv0: "HOME/.local/share/uv/tools/tool/bin/tool",
				Expose: []string{"HOME/.local/share/uv/python", "HOME/.local/share/uv/tools/tool"}},
		},
		{
			name: "pip install --user",
			make: func(h *host) {
				h.file(".local/bin/tool", "#!/usr/bin/python3\n")
				h.file(".local/lib/python3.11/site-packages/tool/__init__.py", "")
			},
			want: Installation{Program: "HOME/.local/bin/tool", Argv0: "HOME/.local/bin/tool",
				Expose: []string{"HOME/.local/bin/tool", "HOME/.local/lib/python3.11/site-packages"}},
		},
		{
			name: "npm link to a checkout, dependencies in the monorepo above",
			make: func(h *host) {
				h.file("src/mono/packages/tool/cli.js", "#!/usr/bin/perl\n")
				h.file("src/mono/packages/tool/package.json", "{}")
				h.file("src/mono/node_modules/dep/index.js", "")
				h.file("src/mono/secret", "s")
				h.link("HOME/src/mono/packages/tool", ".npm-global/lib/node_modules/tool")
				h.link("../lib/node_modules/tool/cli.js", ".npm-global/bin/tool")
			},
			want: Installation{Program: "HOME/.npm-global/bin/tool", Argv0: "HOME/src/mono/packages/tool/cli.js",
				Expose: []string{"HOME/src/mono/node_modules", "HOME/src/mono/packages/tool"}},
		},
		{
			name: "names with spaces, quotes and brackets",
			make: func(h *host) {
				h.file("my [old] 'tools'/node_modules/a tool/cli.js", "#!/usr/bin/env -S perl -w\n")
				h.link("HOME/my [old] 'tools'/node_modules/a tool/cli.js", ".local/bin/a tool")
			},
			program: "a tool",
			want: Installation{Program: "HOME/.local/bin/a tool", Argv0: "HOME/my [old] 'tools'/node_modules/a tool/cli.js",
				Expose: []string{"HOME/my [old] 'tools'/node_modules"}},
		},
		{
			name: "interpreter named through a link that is not exposed",
			make: func(h *host) {
				h.file("opt/tool/package.json", "{}")
				h.file("opt/tool/cli.js", "#!HOME/bin/js --flag one\n")
				h.file("opt/js-2/bin/js2", elfText)
				h.link("HOME/opt/js-2/bin/js2", "bin/js")
				h.link("HOME/opt/tool/cli.js", "bin/tool")
			},
			want: Installation{Program: "HOME/bin/tool", Argv0: "HOME/opt/js-2/bin/js2",
				Args:   []string{"--flag one", "HOME/opt/tool/cli.js"},
				Expose: []string{"HOME/opt/js-2/bin/js2", "HOME/opt/tool"}},
		},
		{
			name: "asdf shim",
			make: func(h *host) {
				h.file(".asdf/shims/tool", "#!/usr/bin/env bash\n# asdf-plugin: nodejs 22.0.0\nexec HOME/.asdf/bin/asdf exec \"tool\" \"$@\"\n")
				h.file(".asdf/installs/nodejs/22.0.0/bin/tool", elfText)
				h.file(".asdf/bin/asdf", elfText)
			},
			want: Installation{Program: "HOME/.asdf/shims/tool", Argv0: "HOME/.asdf/installs/nodejs/22.0.0/bin/tool",
				Expose: []string{"HOME/.asdf/installs/nodejs/22.0.0/bin/tool"}},
		},
		{
			name: "mise shim, a link to mise itself",
			make: func(h *host) {
				h.file(".local/bin/mise", elfText)
				h.link("HOME/.local/bin/mise", ".local/share/mise/shims/tool")
				h.file(".local/share/mise/installs/npm-tool/1.9.0/bin/tool", elfText)
				h.file(".local/share/mise/installs/npm-tool/1.10.0/bin/tool", elfText)
			},
			want: Installation{Program: "HOME/.local/share/mise/shims/tool",
				Argv0:  "HOME/.local/share/mise/installs/npm-tool/1.10.0/bin/tool",
				Expose: []string{"HOME/.local/share/mise/installs/npm-tool/1.10.0/bin/tool"}},
		},
		{
			name: "ROOT/runtimes/NAME comes first and is exposed",
			make: func(h *host) {
				h.file(".agentconnect/runtimes/x/node_modules/tool/cli.js", "#!/usr/bin/perl\n")
				h.link("../tool/cli.js", ".agentconnect/runtimes/x/node_modules/.bin/tool")
				h.file(".local/bin/tool", elfText)
			},
			want: Installation{Program: "HOME/.agentconnect/runtimes/x/node_modules/.bin/tool",
				Argv0:  "HOME/.agentconnect/runtimes/x/node_modules/tool/cli.js",
				Expose: []string{"HOME/.agentconnect/runtimes/x/node_modules"}},
		},
		{
			name:    "a program of the system needs nothing",
			make:    func(h *host) {},
			program: "/usr/bin/env",
			want:    Installation{Program: "/usr/bin/env", Argv0: "/usr/bin/env"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := newHost(t)
			tt.make(h)
			program := tt.program
			if program == "" {
				program = "tool"
			}
			in, err := Find(h.options(), strings.ReplaceAll(program, "HOME", h.home))
			if err != nil {
				t.Fatal(err)
			}
			checkPromise(t, h.options(), in)
			if diff := cmp.Diff(tt.want, h.relative(in)); diff != "" {
				t.Errorf("installation (-want +got):\n%s", diff)
			}
		})
	}
}

// checkPromise checks what holds for every installation.
func checkPromise(t *testing.T, o Options, in Installation) {
	t.Helper()
	for _, p := range append(slices.Clone(in.Expose), in.Argv0) {
		real, err := filepath.EvalSymlinks(p)
		if err != nil || real != p {
			t.Errorf("%s is not a resolved path that exists (%s, %v)", p, real, err)
		}
		if inside(o.Home, p) || inside(o.Root, p) {
			t.Errorf("%s is exposed: it holds the home or ROOT", p)
		}
	}
}

func TestWhatIsNeverExposed(t *testing.T) {
	tests := []struct {
		name, want string
		make       func(h *host)
		program    string
	}{
		{"a program in ~/.ssh", "no agent sees", func(h *host) { h.file(".ssh/tool", elfText) }, "HOME/.ssh/tool"},
		{"a link to a program in ~/.gnupg", "no agent sees", func(h *host) {
			h.file(".gnupg/tool", elfText)
			h.link("HOME/.gnupg/tool", ".local/bin/tool")
		}, "tool"},
		{"a program of another agent", "AgentConnect's own directory", func(h *host) {
			h.file(".agentconnect/agents/a/workspace/tool", elfText)
			h.link("HOME/.agentconnect/agents/a/workspace/tool", ".local/bin/tool")
		}, "tool"},
		{"another runtime's directory in ROOT", "AgentConnect's own directory", func(h *host) {
			h.file(".agentconnect/runtimes/y/bin/tool", elfText)
		}, "HOME/.agentconnect/runtimes/y/bin/tool"},
		{"an interpreter in ~/.ssh", "no agent sees", func(h *host) {
			h.file(".ssh/js", elfText)
			h.file(".local/bin/tool", "#!HOME/.ssh/js\n")
		}, "tool"},
		{"a missing interpreter", "is not installed", func(h *host) {
			h.file(".local/bin/tool", "#!/usr/bin/env no-such-interpreter\n")
		}, "tool"},
		{"a first line without a path", "no absolute interpreter", func(h *host) {
			h.file(".local/bin/tool", "#!node\n")
		}, "tool"},
		{"a shim that starts itself", "", func(h *host) {
			h.file(".local/bin/tool", "#!/bin/sh\nexec \"$(dirname \"$0\")/tool\" \"$@\"\n")
		}, "tool"},
		{"a name that is not UTF-8", "not UTF-8", func(h *host) { h.file(".local/bin/t\xffol", elfText) }, "t\xffol"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := newHost(t)
			tt.make(h)
			in, err := Find(h.options(), strings.ReplaceAll(tt.program, "HOME", h.home))
			if tt.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				checkPromise(t, h.options(), in)
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got %+v, %v; want an error with %q", in, err, tt.want)
			}
		})
	}
}

func TestTreesThatHoldTheHomeOrStateAreNotExposed(t *testing.T) {
	h := newHost(t)
	o := h.options()
	for _, d := range []string{
		"/", "/home", h.home, filepath.Dir(h.home), h.path(".config"), h.path(".local/share"), h.path(".ssh"),
		h.path(".claude"), h.path(".local/share/opencode"), h.path(".agentconnect"), h.path(".agentconnect/agents/a"), "/etc/ssl", "/run/user/1",
	} {
		if o.wholesale(d) {
			t.Errorf("%s may be exposed as a whole", d)
		}
	}
	for _, d := range []string{h.path(".npm-global/lib/node_modules"), h.path(".claude/local/node_modules"), h.path(".agentconnect/runtimes/x/node_modules")} {
		if !o.wholesale(d) {
			t.Errorf("%s may not be exposed", d)
		}
	}
}

func TestProgramThatIsNotThere(t *testing.T) {
	h := newHost(t)
	h.dir(".local/bin/tool") // a directory of that name
	h.file(".cargo/bin/tool", elfText)
	if err := os.Chmod(h.path(".cargo/bin/tool"), 0o644); err != nil {
		t.Fatal(err)
	}
	h.link("HOME/nowhere", "bin/tool")
	for _, p := range []string{"tool", "", "../tool", "/no/such/tool", "a\x00b"} {
		if _, err := Find(h.options(), p); !errors.Is(err, ErrNotInstalled) {
			t.Errorf("%q: %v, want ErrNotInstalled", p, err)
		}
	}
}

func TestSearchPathEntriesInsideROOTAreIgnored(t *testing.T) {
	h := newHost(t)
	h.file(".agentconnect/agents/a/workspace/bin/tool", elfText)
	o := h.options()
	o.Path = h.path(".agentconnect/agents/a/workspace/bin") + ":relative/bin:"
	if in, err := Find(o, "tool"); !errors.Is(err, ErrNotInstalled) {
		t.Errorf("found %+v, %v: an agent could put its own program in the runtime's place", in, err)
	}
}

func TestReadRootsOfTheConfiguration(t *testing.T) {
	h := newHost(t)
	h.file(".local/bin/tool", elfText)
	h.dir("opt/data")
	o := h.options()
	o.ReadRoots = []string{h.path("opt/data")}
	in, err := Find(o, "tool")
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{h.path(".local/bin/tool"), h.path("opt/data")}; !slices.Equal(in.Expose, want) {
		t.Errorf("exposed %q, want %q", in.Expose, want)
	}
	for _, bad := range []string{h.home, h.path(".ssh"), h.path("nowhere"), h.path(".config"), "/etc"} {
		if bad == h.path(".ssh") || bad == h.path(".config") {
			h.dir(bad)
		}
		o.ReadRoots = []string{bad}
		if in, err := Find(o, "tool"); err == nil {
			t.Errorf("readRoots %s: exposed %q", bad, in.Expose)
		}
	}
}

// The real thing: a venv made by python3 starts with what is exposed.
func TestRealVenvStarts(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed")
	}
	bwrap, err := exec.LookPath("bwrap")
	if err != nil {
		t.Skip("bwrap is not installed")
	}
	h := newHost(t)
	h.dir(".local/share")
	if out, err := exec.Command(python, "-m", "venv", "--without-pip", h.path(".local/share/v env")).CombinedOutput(); err != nil {
		t.Skipf("python3 makes no venv here: %s", out)
	}
	h.file(".local/share/v env/tool.py", "import sys; print(sys.prefix)\n")
	// A path with a space cannot stand in a first line: pip writes such a shim instead.
	h.file(".local/share/v env/bin/tool", "#!/bin/sh\nexec \"HOME/.local/share/v env/bin/python\" \"HOME/.local/share/v env/tool.py\" \"$@\"\n")
	h.link("HOME/.local/share/v env/bin/tool", ".local/bin/tool")
	in, err := Find(h.options(), "tool")
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"--unshare-all", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev"}
	for _, e := range in.Expose {
		args = append(args, "--ro-bind", e, e)
	}
	out, err := exec.Command(bwrap, append(append(args, "--"), in.Argv()...)...).CombinedOutput()
	if got := strings.TrimSpace(string(out)); err != nil || got != h.path(".local/share/v env") {
		t.Errorf("the tool says %q, %v; want its venv's prefix; exposed %q", got, err, in.Expose)
	}
}

func TestRegistry(t *testing.T) {
	reg := NewRegistry(map[string]Def{
		"gemini": {Args: []string{"--experimental-acp"}},
		"Mine":   {Command: "mine", Args: []string{"serve"}, Env: Env{"A": "1"}},
	})
	g, err := reg.Get("gemini")
	if err != nil {
		t.Fatal(err)
	}
	if got := g.Argv("gemini"); !slices.Equal(got, []string{"gemini", "--experimental-acp"}) || g.NPM == "" {
		t.Errorf("gemini starts as %q, npm %q", got, g.NPM)
	}
	m, err := reg.Get("Mine")
	if err != nil {
		t.Fatal(err)
	}
	if m.Programs[0] != "mine" || m.Env["A"] != "1" || !m.Custom || m.Nesting {
		t.Errorf("Mine: %+v", m)
	}
	if _, err := reg.Get("mine"); !errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), "did you mean Mine?") {
		t.Errorf("mine: %v", err)
	}
	for name, meant := range map[string]string{"claude": "claude-acp", "Claude-Code": "claude-acp", "codex": "codex-acp", "gemini-cli": "gemini"} {
		if _, err := reg.Get(name); !errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), "did you mean "+meant+"?") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := reg.Get("zzz"); !errors.Is(err, ErrUnknown) {
		t.Errorf("zzz: %v", err)
	}
	var nesting []string
	for _, rt := range reg.All() {
		if rt.Nesting {
			nesting = append(nesting, rt.ID)
		}
		if !rt.Internal && len(rt.Programs) == 0 {
			t.Errorf("%s has no program", rt.ID)
		}
		if rt.Install == "" && !rt.Internal {
			t.Errorf("%s: nothing says how to install it", rt.ID)
		}
	}
	if want := []string{"claude-acp", "codex-acp"}; !slices.Equal(nesting, want) {
		t.Errorf("nesting is on by default for %q, want %q", nesting, want)
	}
}

func TestListTellsWhatIsInstalled(t *testing.T) {
	h := newHost(t)
	h.file(".local/bin/goose", elfText)
	h.file(".local/bin/qwen", "#!/usr/bin/env no-such-interpreter\n")
	o := h.options()
	o.Path = ""
	got := map[string]string{}
	for _, s := range NewRegistry(nil).List(o) {
		got[s.ID] = fmt.Sprint(s.Installed, " ", strings.ReplaceAll(s.Path, h.home, "HOME"))
		switch {
		case s.ID == "qwen" && !strings.Contains(s.Reason, "no-such-interpreter"):
			t.Errorf("qwen: reason %q", s.Reason)
		case s.ID == "cline" && s.Install == "" && !s.Installed:
			t.Error("cline: nothing says how to install it")
		}
	}
	for id, want := range map[string]string{"goose": "true HOME/.local/bin/goose", "qwen": "false ", "selftest": "true "} {
		if got[id] != want {
			t.Errorf("%s: %q, want %q", id, got[id], want)
		}
	}
}

func TestOlderNameOfTheProgramIsFound(t *testing.T) {
	h := newHost(t)
	h.file(".local/bin/claude-code-acp", elfText)
	o := h.options()
	o.Path = ""
	rt, err := NewRegistry(nil).Get("claude-acp")
	if err != nil {
		t.Fatal(err)
	}
	in, err := FindRuntime(o, rt)
	if err != nil || in.Program != h.path(".local/bin/claude-code-acp") {
		t.Errorf("found %q, %v", in.Program, err)
	}
}

func FuzzShim(f *testing.F) {
	f.Add("/usr/bin/env node", pnpm)
	f.Add("/bin/sh", "exec \"$basedir/../x\" \"$@\"")
	f.Add("/usr/bin/env -S FOO=1 node --x", "D=`dirname $0`\n$D/run.sh")
	f.Fuzz(func(t *testing.T, line, body string) {
		in, program, err := parseShebang(line)
		if err == nil && (program == "") == (in.path == "") {
			t.Errorf("first line %q: interpreter %q and program %q", line, in.path, program)
		}
		paths, commands := shimTargets(body, "/home/jo/bin", "/home/jo")
		for _, p := range paths {
			if !filepath.IsAbs(p) || filepath.Clean(p) != p {
				t.Errorf("target %q is not a clean absolute path", p)
			}
		}
		for _, c := range commands {
			if strings.ContainsRune(c, '/') {
				t.Errorf("command %q has a slash", c)
			}
		}
	})
}
