// The machine: its users, its files, and an editor.

package debtest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// patience is how long anything may take that is done at once on an idle machine. An emulated
// one takes its time.
var patience = map[bool]time.Duration{false: 3 * time.Minute, true: 15 * time.Minute}[os.Getenv("AGENTCONNECT_TEST_MACHINE") == emulated]

const emulated = "apparmor"

// who runs a command: uid 0 is root, for others as in a session of theirs.
type who struct {
	name string
	uid  int
}

var (
	root   = who{"root", 0}
	tester = who{"tester", 1000} // lingers
	guest  = who{"guest", 1001}  // does not
)

// command is a shell script of that user.
func (w who) command(ctx context.Context, script string) *exec.Cmd {
	argv := []string{"/bin/sh", "-c", script}
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "NO_COLOR=1", "DEBIAN_FRONTEND=noninteractive"}
	if w.uid != 0 {
		home, _ := exec.Command("/bin/sh", "-c", "getent passwd "+w.name+" | cut -d: -f6").Output()
		dir := strings.TrimSpace(string(home))
		argv = append([]string{"setpriv", "--reuid", w.name, "--regid", fmt.Sprint(gid(w.name)), "--init-groups", "--"}, argv...)
		env = append(env, "HOME="+dir, "USER="+w.name, "LOGNAME="+w.name)
		if _, err := os.Stat(fmt.Sprintf("/run/user/%d", w.uid)); err == nil {
			env = append(env, fmt.Sprintf("XDG_RUNTIME_DIR=/run/user/%d", w.uid))
		}
	}
	c := exec.CommandContext(ctx, argv[0], argv[1:]...)
	c.Env, c.Dir = env, "/"
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	c.WaitDelay = 5 * time.Second
	return c
}

func gid(name string) string {
	out, _ := exec.Command("id", "-g", name).Output()
	return strings.TrimSpace(string(out))
}

// try runs a script; all that it said is in out.
func (w who) try(t testing.TB, script string) (out string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c := w.command(ctx, script)
	b, err := c.CombinedOutput()
	if err != nil && c.ProcessState == nil {
		t.Fatalf("%s: %s: %v", w.name, script, err)
	}
	return string(b), c.ProcessState.ExitCode()
}

// sh runs a script that has to end well.
func (w who) sh(t testing.TB, script string) string {
	t.Helper()
	out, code := w.try(t, script)
	if code != 0 {
		t.Fatalf("%s: %s\nexit code %d:\n%s", w.name, script, code, out)
	}
	return out
}

// says runs a script, however it ends, whose output has to hold all of the words.
func (w who) says(t testing.TB, script string, words ...string) string {
	t.Helper()
	out, code := w.try(t, script)
	for _, word := range words {
		if !strings.Contains(out, word) {
			t.Errorf("%s: %s\nexit code %d, without %q:\n%s", w.name, script, code, word, out)
		}
	}
	return out
}

// until waits for a script to end well.
func (w who) until(t testing.TB, script string) {
	t.Helper()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); ; <-tick.C {
		out, code := w.try(t, script)
		if code == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: %s\nstill exit code %d:\n%s", w.name, script, code, out)
		}
	}
}

// from makes apt install from one of the repositories that test.sh built, as README says.
func from(t testing.TB, repository string) {
	t.Helper()
	root.sh(t, "cp /opt/test/"+repository+"/agentconnect-archive-keyring.pgp /usr/share/keyrings/ && "+
		"cp /opt/test/"+repository+"/agentconnect.sources /etc/apt/sources.list.d/ && apt-get -q update")
}

// files lists what there is on the disk: path → what it is. Left out is what every
// installation leaves (logs, caches, dpkg's and apt's own notes) and what is no disk.
func files(t testing.TB) map[string]string {
	t.Helper()
	out := map[string]string{}
	skip := []string{"/proc", "/sys", "/dev", "/run", "/tmp", "/var/tmp", "/opt/test", "/srv/mirror", "/var/log", "/var/cache", "/var/lib/dpkg", "/var/lib/apt",
		"/var/lib/systemd", "/home", "/root"}
	err := filepath.WalkDir("/", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // it is gone meanwhile
		}
		if slices.Contains(skip, path) {
			return filepath.SkipDir
		}
		info, err := d.Info()
		if err != nil {
			return nil //nolint:nilerr // this, too
		}
		what := info.Mode().String()
		if info.Mode().IsRegular() {
			what += fmt.Sprint(" ", info.Size())
		}
		out[path] = what
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// editor is an ACP client: `agentconnect acp ID` and what speaks through it.
type editor struct {
	t       *testing.T
	in      io.WriteCloser
	frames  chan frame
	next    int
	session string
}

type frame struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params struct {
		Update struct {
			Content struct {
				Text string `json:"text"`
			} `json:"content"`
		} `json:"update"`
	} `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  json.RawMessage `json:"error"`
}

func (w who) attach(t *testing.T, id, workspace string) *editor {
	t.Helper()
	c := w.command(context.Background(), "exec agentconnect acp "+id)
	e := &editor{t: t, frames: make(chan frame, 1<<16)}
	var err error
	if e.in, err = c.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	c.Stderr = &said
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer close(e.frames)
		r := bufio.NewReader(out)
		for {
			line, err := r.ReadBytes('\n')
			var f frame
			if len(line) > 0 && json.Unmarshal(line, &f) == nil {
				e.frames <- f
			}
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		e.in.Close()
		<-ended
		if err := c.Wait(); err != nil && t.Failed() {
			t.Logf("the editor's agentconnect: %v: %s", err, &said)
		}
	})
	e.answer(e.ask("initialize", map[string]any{"protocolVersion": 1, "clientCapabilities": map[string]any{}}))
	r, _ := e.answer(e.ask("session/new", map[string]any{"cwd": workspace, "mcpServers": []any{}}))
	var s struct {
		ID string `json:"sessionId"`
	}
	if err := json.Unmarshal(r, &s); err != nil || s.ID == "" {
		t.Fatalf("session/new: %s", r)
	}
	e.session = s.ID
	return e
}

func (e *editor) ask(method string, params any) int {
	e.t.Helper()
	e.next++
	b, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": e.next, "method": method, "params": params})
	if err == nil {
		_, err = e.in.Write(append(b, '\n'))
	}
	if err != nil {
		e.t.Fatalf("%s: %v", method, err)
	}
	return e.next
}

// prompt begins a turn.
func (e *editor) prompt(text string) int {
	return e.ask("session/prompt", map[string]any{"sessionId": e.session, "prompt": []any{map[string]string{"type": "text", "text": text}}})
}

// answer waits for the answer; said is what the agent said meanwhile.
func (e *editor) answer(id int) (result json.RawMessage, said string) {
	e.t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		select {
		case f, ok := <-e.frames:
			switch {
			case !ok:
				e.t.Fatalf("the editor was cut off in request %d, after %q", id, said)
			case f.Method != "":
				said += f.Params.Update.Content.Text
			case string(f.ID) != fmt.Sprint(id):
				e.t.Fatalf("an answer to %s while %d is open", f.ID, id)
			case f.Error != nil:
				e.t.Fatalf("request %d: %s", id, f.Error)
			default:
				return f.Result, said
			}
		case <-timer.C:
			e.t.Fatalf("no answer to request %d, after %q", id, said)
		}
	}
}
