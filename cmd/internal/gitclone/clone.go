package gitclone

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/hostfacts"
)

// Request asks the program that makes agents' namespaces for the agent's clone.
type Request struct {
	// Policy is the agent's, whose repository is cloned into its workspace.
	Policy   sandbox.Policy `json:"policy"`
	Launcher string         `json:"launcher"`
	Bwrap    string         `json:"bwrap"`
	// Upstream is the address that the repository came from, if the agent may know it.
	Upstream string `json:"upstream,omitempty"`
}

// cloneTime bounds the clone.
const cloneTime = 30 * time.Minute

// By clones in that program: what the host lets us do (AppArmor) may hang on it.
func By(ctx context.Context, supervisor string, q Request) error {
	question, err := json.Marshal(q)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, supervisor, Word)
	cmd.Stdin = bytes.NewReader(question)
	var said bytes.Buffer
	cmd.Stderr = &said
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil {
		if text := strings.TrimSpace(said.String()); text != "" {
			return errors.New(text)
		}
		return fmt.Errorf("%s: %w", supervisor, err)
	}
	return nil
}

// Word is the argument by which that program clones.
const Word = "clone"

// Clone makes the agent's clone, with the agent's boundary around git: what is cloned is no
// more trusted than the agent.
func Clone(ctx context.Context, q Request) error {
	ctx, cancel := context.WithTimeoutCause(ctx, cloneTime, fmt.Errorf("git was not done after %s", cloneTime))
	defer cancel()
	p := q.Policy
	p.Network, p.Nesting, p.DieWithParent = sandbox.NetworkNone, false, true
	p.ChannelDir, p.SecretsDir, p.Files, p.Grants, p.OwnCgroup = "", "", nil, nil, false
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	argv := []string{
		"git", "clone", "--quiet", "--no-hardlinks", "--origin", "origin",
		"--config", "remote.origin.receivepack=" + sandbox.GuestPath + " git-receive-pack",
	}
	if q.Upstream != "" {
		argv = append(argv, "--config", "remote.upstream.url="+q.Upstream, "--config", "remote.upstream.fetch=+refs/heads/*:refs/remotes/upstream/*")
	}
	st := launch.Start{
		Launcher: q.Launcher, Bwrap: q.Bwrap, Dir: p.Workspace,
		Argv:    append(argv, "--", sandbox.RepositoryPath, p.Workspace),
		Env:     []string{"HOME=" + p.Home, "USER=" + p.User, "LOGNAME=" + p.User, "PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8", "TMPDIR=/tmp"},
		Compile: func() (*sandbox.Plan, error) { return sandbox.Compile(p, hostfacts.Host{}) },
		Stdout:  w, Stderr: w,
	}
	process, err := st.Run(ctx)
	w.Close()
	if err != nil {
		return err
	}
	defer process.Kill()
	stop := context.AfterFunc(ctx, process.Kill)
	defer stop()
	text, _ := io.ReadAll(io.LimitReader(r, 8<<10)) // what it says is for the error alone
	_, _ = io.Copy(io.Discard, r)
	<-process.Done()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if end := process.End(); end.Code != 0 {
		return fmt.Errorf("git clone: %s: %s", end.Text, strings.ToValidUTF8(strings.TrimSpace(string(text)), "?"))
	}
	return nil
}
