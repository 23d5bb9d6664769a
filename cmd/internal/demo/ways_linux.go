// Attacks that go by way of a program of the host: what an agent leaves behind for the next
// start, or asks its client, or has the operator's command line carry. Each has the same attempt
// without our boundary as its control: with bubblewrap alone, or with an agent that runs free.

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"agentconnect.md/sandbox/cmd/internal/selftest"
)

// free is an agent without a boundary: the control of what goes by ACP.
const free = "free"

// way is one attack. Both functions report with a nil error that it worked.
type way struct {
	id, ref, title  string
	inside, outside func(ctx context.Context) error
}

func (w way) try(ctx context.Context) row {
	seen := func(err error) selftest.Seen {
		if err == nil {
			return selftest.Worked
		}
		return selftest.Refused
	}
	in, out := w.inside(ctx), w.outside(ctx)
	r := row{Outside: seen(out), Result: selftest.Result{
		ID: w.id, Ref: w.ref, Title: w.title, Kind: selftest.MustFail, Expected: selftest.Refused, Seen: seen(in), Control: true,
	}}
	switch {
	case in == nil:
		r.Wrong = "it worked"
	case out != nil:
		r.Wrong = fmt.Sprintf("proves nothing: outside it fails, too: %v", out)
	}
	return r
}

var errNothing = errors.New("nothing came of it")

func (s *stage) ways() []way {
	secret := filepath.Join(s.base, "elsewhere")
	canary := filepath.Join(secret, "canary")
	const text = "elsewhere-canary"
	prepare := func() error {
		return errors.Join(os.MkdirAll(secret, 0o700), os.WriteFile(canary, []byte(text), 0o600))
	}
	shows := func(out string, err error) error {
		if strings.Contains(out, text) {
			return nil
		}
		return errors.Join(err, errNothing)
	}
	bwrap := func(ctx context.Context, args ...string) (string, error) {
		out, err := exec.CommandContext(ctx, "bwrap", append([]string{"--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--unshare-all"}, args...)...).CombinedOutput()
		return string(out), err
	}
	// fresh adds an agent of its own for one way.
	fresh := func(ctx context.Context, id string, flags ...string) error {
		_, err := s.agentconnect(ctx, append([]string{"agent", "add", id, "--runtime", "selftest", "--network", "none"}, flags...)...)
		return err
	}
	ws := s.workspace(agent)
	list := []way{
		{"option-command", "CVE-2024-32462", "a command that is an option of bubblewrap's",
			func(ctx context.Context) error {
				return errors.Join(prepare(), shows(s.agentconnect(ctx, "agent", "exec", agent, "--", "--ro-bind", "/", "/", "--", "/bin/cat", canary)))
			},
			func(ctx context.Context) error {
				return shows(bwrap(ctx, "--ro-bind", "/", "/", "--", "/bin/cat", canary))
			}},
		{"mount-point-link", "CVE-2026-87766", "a link left in the home where a mount point will be",
			func(ctx context.Context) error {
				target := filepath.Join(s.base, "target-ours")
				grant := filepath.Join(s.base, "for-link")
				if err := errors.Join(os.MkdirAll(target, 0o700), os.MkdirAll(filepath.Join(grant, "sub"), 0o700)); err != nil {
					return nil //nolint:nilerr // not tried: as bad as if it worked
				}
				if err := fresh(ctx, "linked", "--grant", filepath.Join(grant, "sub")+":rw"); err != nil {
					return nil //nolint:nilerr // not tried: as bad as if it worked
				}
				// What the agent could leave: its private home holds the way to the grant.
				rel, err := filepath.Rel(s.home, grant)
				if err != nil {
					return nil //nolint:nilerr // not tried: as bad as if it worked
				}
				at := filepath.Join(s.root, "agents", "linked", "home", rel)
				if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o700), os.Symlink("/oldroot"+target, at)); err != nil {
					return nil //nolint:nilerr // not tried: as bad as if it worked
				}
				_, err = s.agentconnect(ctx, "agent", "exec", "linked", "--", "/bin/true")
				return madeIn(target, err)
			},
			func(ctx context.Context) error {
				target, home := filepath.Join(s.base, "target-bwrap"), filepath.Join(s.base, "home-bwrap")
				if err := errors.Join(os.MkdirAll(target, 0o700), os.MkdirAll(home, 0o700), os.Symlink("/oldroot"+target, filepath.Join(home, "link"))); err != nil {
					return err
				}
				// bubblewrap makes mount points while the host's root lies at /oldroot.
				_, err := bwrap(ctx, "--bind", home, "/h", "--ro-bind", "/usr", "/h/link/sub", "--", "/bin/true")
				return madeIn(target, err)
			}},
		{"grant-swapped", "CVE-2024-42472", "a granted folder that became a link",
			func(ctx context.Context) error {
				dir := filepath.Join(s.base, "swapped")
				if err := os.MkdirAll(dir, 0o700); err != nil {
					return nil //nolint:nilerr // not tried: as bad as if it worked
				}
				if err := fresh(ctx, "swapped", "--grant", dir+":ro"); err != nil {
					return nil //nolint:nilerr // not tried: as bad as if it worked
				}
				if err := errors.Join(os.Remove(dir), os.Symlink(secret, dir)); err != nil {
					return nil //nolint:nilerr // not tried: as bad as if it worked
				}
				return shows(s.agentconnect(ctx, "agent", "exec", "swapped", "--", "/bin/cat", filepath.Join(dir, "canary")))
			},
			func(ctx context.Context) error {
				dir := filepath.Join(s.base, "swapped")
				return shows(bwrap(ctx, "--ro-bind", dir, dir, "--", "/bin/cat", filepath.Join(dir, "canary")))
			}},
	}
	// Sessions in a folder that nobody opened: the agent, or its model, chose the directory.
	link := filepath.Join(ws, "link-elsewhere")
	for _, c := range []struct{ id, title, dir string }{
		{"cwd-root", "a session in /", "/"},
		{"cwd-elsewhere", "a session in a folder of the user's", secret},
		{"cwd-link", "a session in a link of the workspace", link},
		{"cwd-dotdot", "a session in WORKSPACE/../…", ws + strings.Repeat("/..", 40) + secret},
		{"cwd-root-dir", "a session in AgentConnect's root", s.root},
	} {
		open := func(id string) func(ctx context.Context) error {
			return func(ctx context.Context) error {
				if _, err := os.Lstat(link); err != nil {
					if err := errors.Join(prepare(), os.Symlink(secret, link)); err != nil {
						return err
					}
				}
				return s.session(ctx, id, c.dir, "", nil)
			}
		}
		list = append(list, way{c.id, "CVE-2025-59532", c.title, open(agent), open(free)})
	}
	// The runtime asks its client, which acts outside.
	for _, c := range []struct{ id, ref, title, word string }{
		{"client-write", "CASES 53", "have the client write a file", "client-write " + canary + " x"},
		{"client-read", "CASES 53", "have the client read a file", "client-read " + canary},
		{"client-terminal", "CASES 54", "have the client run a command", "client-terminal true"},
		{"client-write-link", "CASES 53", "have the client write through a link in the workspace", "client-write " + link + "/canary x"},
	} {
		ask := func(id string) func(ctx context.Context) error {
			return func(ctx context.Context) error {
				asked := false
				err := s.session(ctx, id, s.workspace(id), c.word, func(method string) {
					asked = asked || strings.HasPrefix(method, "fs/") || strings.HasPrefix(method, "terminal/")
				})
				if err == nil && !asked {
					err = errNothing
				}
				return err
			}
		}
		list = append(list, way{c.id, c.ref, c.title, ask(agent), ask(free)})
	}
	return list
}

// madeIn: something was made in dir.
func madeIn(dir string, err error) error {
	entries, rerr := os.ReadDir(dir)
	if rerr != nil {
		return rerr
	}
	if len(entries) == 0 {
		return errors.Join(err, errNothing)
	}
	return nil
}

// session opens a session in dir as an editor with everything on offer does, and takes a turn
// in it if there is a text. asked is told what the runtime asks of its client, which refuses.
func (s *stage) session(ctx context.Context, id, dir, text string, asked func(method string)) error {
	if id == free {
		if err := s.addFree(ctx); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, "agentconnect"), "acp", id)
	cmd.Env, cmd.Dir = s.env, s.home
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	defer func() {
		in.Close()
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait() // the answers count, not how it ends
	}()
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<24)
	call := func(n int, method string, params any) (json.RawMessage, error) {
		b, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": n, "method": method, "params": params})
		if err != nil {
			return nil, err
		}
		if _, err := in.Write(append(b, '\n')); err != nil {
			return nil, err
		}
		for lines.Scan() {
			var m struct {
				ID     json.RawMessage           `json:"id"`
				Method string                    `json:"method"`
				Result json.RawMessage           `json:"result"`
				Error  *struct{ Message string } `json:"error"`
			}
			if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
				return nil, err
			}
			switch {
			case m.Method != "" && m.ID != nil:
				if asked != nil {
					asked(m.Method)
				}
				fmt.Fprintf(in, `{"jsonrpc":"2.0","id":%s,"error":{"code":-32000,"message":"no"}}`+"\n", m.ID)
			case m.Method == "" && string(m.ID) == fmt.Sprint(n):
				if m.Error != nil {
					return nil, errors.New(m.Error.Message)
				}
				return m.Result, nil
			}
		}
		return nil, errors.Join(lines.Err(), io.ErrUnexpectedEOF)
	}
	offer := map[string]any{"fs": map[string]bool{"readTextFile": true, "writeTextFile": true}, "terminal": true}
	if _, err := call(1, "initialize", map[string]any{"protocolVersion": 1, "clientCapabilities": offer}); err != nil {
		return err
	}
	r, err := call(2, "session/new", map[string]any{"cwd": dir, "mcpServers": []any{}})
	if err != nil || text == "" {
		return err
	}
	var made struct {
		SessionID string `json:"sessionId"`
	}
	if err := json.Unmarshal(r, &made); err != nil {
		return err
	}
	_, err = call(3, "session/prompt", map[string]any{"sessionId": made.SessionID, "prompt": []any{map[string]string{"type": "text", "text": text}}})
	return err
}

// addFree adds the agent that runs without a boundary, once. Its home is the demo's, so that
// the selftest keeps its sessions there.
func (s *stage) addFree(ctx context.Context) error {
	if _, err := os.Stat(filepath.Join(s.root, "agents", free)); err == nil {
		return nil
	}
	home := filepath.Join(s.base, "freehome")
	runtime := filepath.Join(s.base, "free-runtime")
	script := fmt.Sprintf("#!/bin/sh\nHOME=%s exec %s selftest\n", home, filepath.Join(s.bin, "agentconnect-guest"))
	if err := errors.Join(os.MkdirAll(home, 0o700), os.WriteFile(runtime, []byte(script), 0o700)); err != nil {
		return err
	}
	_, err := s.agentconnect(ctx, "agent", "add", free, "--command", runtime, "--no-sandbox")
	return err
}
