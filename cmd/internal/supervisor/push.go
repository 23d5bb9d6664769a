// What an agent with a clone of its own pushes. git receive-pack takes it in, behind a
// boundary in which nothing but the repository's objects and refs is writable, and in which
// nothing of the agent's is seen; what changed is recorded, and what is no ref taken away.

package supervisor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/gitclone"
	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/hostfacts"
)

// pushTime bounds one push: the next one waits for its end.
const pushTime = 30 * time.Minute

// push connects the guest to git receive-pack.
func (s *Supervisor) push(ctx context.Context, conn *net.UnixConn) error {
	repository := s.spec.Policy.Repository
	switch {
	case repository == "" || !s.spec.Sandboxed:
		return errors.New("this agent has no clone of its own: push to where its repository was cloned from")
	case s.audit == nil:
		return errors.New("nothing is received without an audit log; see the agent's log")
	}
	select {
	case s.pushes <- struct{}{}:
		defer func() { <-s.pushes }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := s.paced.wait(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, pushTime)
	defer cancel()
	before, err := gitclone.Read(repository)
	if err != nil {
		return s.pushFailed(fmt.Errorf("its refs cannot be read: %w", err))
	}
	process, ends, err := s.startReceive(ctx)
	if err != nil {
		return s.pushFailed(err)
	}
	defer process.close()
	err = answerGuest(conn, wire.GuestReply{OK: true})
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if err == nil {
		s.bridge(ctx, conn, process, ends, func() {
			process.sweep()
			s.received(before, process.End())
		})
		return nil
	}
	ends.close()
	process.stop(ctx, 0, execKillGrace)
	<-process.Done()
	process.sweep()
	s.received(before, process.End())
	return err
}

func (s *Supervisor) pushFailed(err error) error {
	s.opts.Log.Error("a push was not received", "error", err)
	s.audit.Asked(audit.Record{Kind: audit.KindPush, Event: "failed", Path: s.spec.Policy.Repository, Text: oneLine("a push was not received: " + err.Error())})
	return errors.New("the push is not received; see the agent's log")
}

// startReceive starts git receive-pack in a boundary of its own: no network, no home, no
// workspace, nothing of the agent's. Our guest prepares the git directory there.
func (s *Supervisor) startReceive(ctx context.Context) (*program, streams, error) {
	stage, err := os.MkdirTemp(s.spec.Inside, "push-")
	if err != nil {
		return nil, streams{}, err
	}
	own := s.spec.Policy
	own.AgentDir, own.HomeDir, own.TmpDir, own.MemoryDir = stage, filepath.Join(stage, "home"), filepath.Join(stage, "tmp"), ""
	own.Workspace = filepath.Join(stage, "workspace")
	own.Read, own.Grants, own.Expose, own.Files, own.Nesting = sandbox.ReadSystem, nil, nil, nil, false
	own.ChannelDir, own.SecretsDir, own.Network, own.Receive, own.OwnCgroup = "", "", sandbox.NetworkNone, true, false
	for _, dir := range []string{own.HomeDir, own.TmpDir, own.Workspace} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return nil, streams{}, errors.Join(err, os.RemoveAll(stage))
		}
	}
	process, ends, err := s.startBridged(ctx, "push", nil, launch.Start{
		Launcher: s.spec.Launcher, Bwrap: s.spec.Bwrap, BwrapIs: s.spec.BwrapIs,
		Argv: []string{sandbox.GuestPath, "receive"}, Dir: own.Workspace,
		Env:     []string{"HOME=" + own.Home, "USER=" + own.User, "LOGNAME=" + own.User, "PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8", "TMPDIR=/tmp"},
		Compile: func() (*sandbox.Plan, error) { return sandbox.Compile(own, hostfacts.Host{}) },
	})
	if err != nil {
		return nil, streams{}, errors.Join(err, os.RemoveAll(stage))
	}
	s.wg.Go(func() {
		<-process.Done()
		if err := os.RemoveAll(stage); err != nil {
			s.opts.Log.Warn("a push left its directory behind", "path", stage, "error", err)
		}
	})
	return process, ends, nil
}

// received records what a push changed. git writes files that hold refs and objects; what
// else is there was put there by something that had git in its hand.
func (s *Supervisor) received(before gitclone.Refs, end launch.End) {
	repository := s.spec.Policy.Repository
	after, err := gitclone.Read(repository)
	odd, oerr := gitclone.Odd(repository)
	failed := func(what string, err error) {
		if err != nil {
			s.audit.Asked(audit.Record{Kind: audit.KindPush, Event: "unread", Path: repository, Text: oneLine(what + ": " + err.Error())})
			s.opts.Log.Error(what, "error", err)
		}
	}
	failed("what a push left cannot be read", errors.Join(err, oerr))
	changes := gitclone.Changes(before.IDs, after.IDs)
	for _, c := range changes {
		s.audit.Asked(audit.Record{Kind: audit.KindPush, Event: "pushed", Path: repository, Text: oneLine("pushed " + c.String()), Detail: map[string]string{"ref": c.Ref, "old": c.Old, "new": c.New}})
	}
	odd = append(odd, slices.DeleteFunc(after.Odd, func(n string) bool { return slices.Contains(before.Odd, n) })...)
	for _, name := range odd {
		s.audit.Add(audit.Record{Kind: audit.KindGit, Event: "push-odd", Path: filepath.Join(repository, name), Text: "no ref and no object: taken away after a push"})
		s.opts.Log.Warn("a push left what is no ref and no object; it is taken away", "path", audit.Printable(name))
	}
	if end.Code != 0 {
		// Cut off: its locks would keep everybody from these refs for ever.
		odd = append(odd, slices.DeleteFunc(after.Locks, func(n string) bool { return slices.Contains(before.Locks, n) })...)
		if len(changes) == 0 {
			s.audit.Asked(audit.Record{Kind: audit.KindPush, Event: "refused", Path: repository, Text: "a push changed nothing: git receive-pack ended with " + cmp.Or(strings.TrimSpace(end.Text), "an error")})
		}
	}
	failed("what a push left cannot be taken away", gitclone.Remove(repository, odd))
}
