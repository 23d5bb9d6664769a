//go:build linux

package runtimes

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// npmHomes are homes with a real npm prefix; the first with the program counts.
func npmHomes() []string {
	homes := glob("/home/*")
	if h, err := os.UserHomeDir(); err == nil {
		homes = append([]string{h}, homes...)
	}
	return homes
}

// bwrapArgs are the least that a program needs beside its installation.
func bwrapArgs(in Installation, home string) []string {
	args := []string{
		"--unshare-all", "--new-session", "--die-with-parent", "--clearenv",
		"--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib",
		"--symlink", "usr/lib64", "/lib64", "--symlink", "usr/sbin", "/sbin",
		"--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", home,
	}
	for _, e := range in.Expose {
		args = append(args, "--ro-bind", e, e)
	}
	path := strings.Join(append(append([]string{}, in.PathDirs...), "/usr/bin", "/bin"), ":")
	return append(args, "--setenv", "PATH", path, "--setenv", "HOME", home, "--chdir", home, "--")
}

// answerInitialize starts argv and gives its answer to an ACP initialize request.
func answerInitialize(t *testing.T, argv []string) map[string]any {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cancel()
		cmd.Wait()
	}()
	const request = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1,"clientCapabilities":{"fs":{"readTextFile":false,"writeTextFile":false},"terminal":false}}}`
	if _, err := stdin.Write([]byte(request + "\n")); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var msg map[string]any
		if json.Unmarshal(lines.Bytes(), &msg) == nil && msg["id"] == 1.0 {
			return msg
		}
	}
	cancel()
	cmd.Wait()
	t.Fatalf("no answer to initialize from %q; stderr:\n%s", argv, stderr.String())
	return nil
}

func TestRealRuntimesStartWithTheirInstallationAlone(t *testing.T) {
	if testing.Short() {
		t.Skip("starts real runtimes")
	}
	bwrap, err := exec.LookPath("bwrap")
	if err != nil {
		t.Skip("bwrap is not installed")
	}
	if out, err := exec.Command(bwrap, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true").CombinedOutput(); err != nil {
		t.Skipf("bwrap cannot start here: %v: %s", err, out)
	}
	reg := NewRegistry(nil)
	for _, id := range []string{"claude-acp", "codex-acp", "gemini", "opencode"} {
		t.Run(id, func(t *testing.T) {
			rt, err := reg.Get(id)
			if err != nil {
				t.Fatal(err)
			}
			for _, home := range npmHomes() {
				program := filepath.Join(home, ".npm-global/bin", rt.Programs[0])
				if executable(program) != nil {
					continue
				}
				in, err := FindRuntime(Options{Home: home, Root: filepath.Join(home, ".agentconnect"), Path: "/usr/bin:/bin"}, rt)
				if err != nil {
					t.Fatal(err)
				}
				if in.Program != program {
					t.Fatalf("found %s, want %s", in.Program, program)
				}
				for _, e := range in.Expose {
					if e == home || filepath.Dir(e) == home {
						t.Errorf("%s is exposed: too much of the home", e)
					}
				}
				t.Logf("argv %q, expose %q, path %q", in.Argv(rt.Args...), in.Expose, in.PathDirs)
				argv := append(append([]string{bwrap}, bwrapArgs(in, home)...), in.Argv(rt.Args...)...)
				got := answerInitialize(t, argv)
				result, ok := got["result"].(map[string]any)
				if !ok || result["protocolVersion"] != 1.0 {
					t.Errorf("answer to initialize: %v", got)
				}
				return
			}
			t.Skipf("%s is not installed in any home's .npm-global (npm install -g %s)", rt.Programs[0], rt.NPM)
		})
	}
}
