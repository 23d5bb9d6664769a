package runtimes

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What an agent can write must not decide what is opened to it.
func TestProgramInAFolderThatAgentsWriteOpensNothingElse(t *testing.T) {
	home, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	write := func(path, text string) string {
		path = filepath.Join(home, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	secret := write("Documents/secret/run", "#!/bin/sh\n")
	write("Documents/secret/s.txt", "SECRET")
	script := write("mono/packages/agent/cli.sh.js", "#!/usr/bin/env true\n")
	write("mono/packages/agent/package.json", "{}")
	if err := os.Symlink(filepath.Dir(secret), filepath.Join(home, "mono", "node_modules")); err != nil {
		t.Fatal(err)
	}
	shebang := write("mono/tool", "#!"+secret+"\n")
	venv := write("mono/v/bin/x", "#!/bin/sh\n")
	write("mono/v/pyvenv.cfg", "home = "+filepath.Join(home, "Documents", "bin")+"\n")
	write("Documents/bin/python3", "")
	leaks := func(writable []string, program string) string {
		in, err := Find(Options{Home: home, Path: "/usr/bin:/bin", Writable: writable}, program)
		if err != nil {
			return "refused: " + err.Error()
		}
		for _, e := range in.Expose {
			if strings.HasPrefix(e, filepath.Join(home, "Documents")) {
				return "opens " + e
			}
		}
		return ""
	}
	opened := 0
	for _, program := range []string{script, shebang, venv} {
		if got := leaks([]string{filepath.Join(home, "mono")}, program); strings.HasPrefix(got, "opens") {
			t.Errorf("%s %s", program, got)
		}
		// The control: where no agent writes, the installation is followed.
		if strings.HasPrefix(leaks(nil, program), "opens") {
			opened++
		}
	}
	if opened == 0 {
		t.Error("none of the programs opens anything even where it is trusted: this shows nothing")
	}
}
