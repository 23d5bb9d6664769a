package runtimes

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestVersionIsWhatThePackageOfTheProgramSays(t *testing.T) {
	base := t.TempDir()
	write := func(path, text string) string {
		t.Helper()
		path = filepath.Join(base, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	write("package.json", `{"version": "9.9.9"}`) // of something else, above node_modules
	script := write("node_modules/@scope/agent/dist/bin/index.js", "")
	write("node_modules/@scope/agent/package.json", `{"name": "@scope/agent", "version": "0.4.2-beta.1"}`)
	write("node_modules/@scope/agent/dist/package.json", `{"type": "module"}`)
	bare := write("node_modules/bare/index.js", "")
	odd := write("node_modules/odd/index.js", "")
	write("node_modules/odd/package.json", `{"version": "1.0\u001b[2J"}`)
	huge := write("node_modules/huge/index.js", "")
	write("node_modules/huge/package.json", `{"version": "1.0.0", "x": "`+strings.Repeat("x", maxManifest)+`"}`)
	pipe := write("node_modules/pipe/index.js", "")
	if err := unix.Mkfifo(filepath.Join(filepath.Dir(pipe), "package.json"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		in   Installation
		want string
	}{
		{Installation{Argv0: script}, "0.4.2-beta.1"},
		{Installation{Argv0: "/usr/bin/node", Args: []string{"--flag", script}}, "0.4.2-beta.1"},
		{Installation{Argv0: bare}, ""}, {Installation{Argv0: odd}, ""}, {Installation{Argv0: huge}, ""}, {Installation{Argv0: pipe}, ""},
		{Installation{Argv0: "/bin/sh"}, ""}, {Installation{}, ""},
	} {
		if got := c.in.Version(); got != c.want {
			t.Errorf("%+v: %q, want %q", c.in, got, c.want)
		}
	}
}
