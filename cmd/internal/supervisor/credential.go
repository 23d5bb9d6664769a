// Repository credentials: answered for the repositories that the operator assigned, from
// the source that the operator named, and each answer is recorded. The token is not kept
// inside; whoever asks inside holds it for as long as it takes to use it.

package supervisor

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/gitcred"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

const (
	// credentialTime is how long a command may take, commandGrace how long its pipes may
	// stay open after it.
	credentialTime = 30 * time.Second
	commandGrace   = time.Second
	// maxCommands bounds the commands that run at one time.
	maxCommands = 2
)

// defaultUsername is what hosts take beside a token.
const defaultUsername = "x-access-token"

// credential answers one query.
func (s *Supervisor) credential(ctx context.Context, conn *net.UnixConn, q wire.CredentialQuery) error {
	repo, err := gitcred.Parse(q.Protocol, q.Host, q.Path)
	if err != nil {
		s.auditCredential("refused", q, "", err.Error())
		return err
	}
	rule := s.credentialRule(repo)
	if rule == nil {
		err := fmt.Errorf("%s is not assigned to this agent", repo)
		s.auditCredential("refused", q, repo.String(), err.Error())
		return err
	}
	switch q.Action {
	case "get":
	case "store":
		return answerGuest(conn, wire.GuestReply{OK: true}) // nothing is kept inside, nor taken from there
	case "erase":
		// git says that the server refused what it was given.
		s.auditCredential("rejected", q, repo.String(), "the server refused the credentials")
		if rule.Daemon {
			if _, _, err := s.askDaemon(ctx, "erase", repo); err != nil {
				s.opts.Log.Warn("the daemon did not hear that credentials are refused", "repository", repo.String(), "error", err)
			}
		}
		return answerGuest(conn, wire.GuestReply{OK: true})
	default:
		return fmt.Errorf("unknown action %q", q.Action)
	}
	if s.audit == nil {
		return errors.New("no credentials without an audit log; see the agent's log")
	}
	username, password, err := s.fetch(ctx, *rule, repo)
	if err != nil {
		s.auditCredential("failed", q, repo.String(), err.Error())
		s.opts.Log.Warn("no credentials for the agent", "repository", repo.String(), "error", err)
		return fmt.Errorf("%s: no credentials: the operator's source failed; see the agent's log", repo)
	}
	if q.Username != "" && q.Username != username && rule.Username != "" {
		err := fmt.Errorf("%s: the credentials are not user %q's", repo, oneLine(q.Username))
		s.auditCredential("refused", q, repo.String(), err.Error())
		return err
	}
	// Recorded before it is given: an answer that nobody knows of is none.
	s.auditCredential("given", q, repo.String(), "")
	return answerGuest(conn, wire.GuestReply{OK: true, Username: username, Password: password})
}

// credentialRule finds the rule for a repository: one that names it before one for all of
// an owner's.
func (s *Supervisor) credentialRule(repo gitcred.Repo) *wire.Credential {
	var best *wire.Credential
	longest := -1
	for i, c := range s.spec.Credentials {
		r, err := gitcred.ParseRule(c.URL)
		if err != nil || !r.Covers(repo) {
			continue
		}
		n := len(r.Path)
		if !r.Below {
			n += 1 << 20
		}
		if n > longest {
			best, longest = &s.spec.Credentials[i], n
		}
	}
	return best
}

// fetch asks the rule's source.
func (s *Supervisor) fetch(ctx context.Context, c wire.Credential, repo gitcred.Repo) (username, password string, err error) {
	switch {
	case c.Secret != "":
		value, ok := s.secretValue(c.Secret)
		if !ok {
			return "", "", fmt.Errorf("secret %s is not set; run `agentconnect secret set %s %s`", c.Secret, s.spec.Agent, c.Secret)
		}
		username, password, err = gitcred.ParseOutput(value)
	case len(c.Command) > 0:
		username, password, err = s.credentialCommand(ctx, c.Command, repo)
	case c.Daemon:
		username, password, err = s.askDaemon(ctx, "get", repo)
	default:
		err = errors.New("the rule names no source")
	}
	if err != nil {
		return "", "", err
	}
	username = cmp.Or(c.Username, username, defaultUsername)
	return username, password, gitcred.CheckAnswer(username, password)
}

// askDaemon asks the daemon, and it the control plane. Nothing of the request but the
// repository, normalised, goes there.
func (s *Supervisor) askDaemon(ctx context.Context, action string, repo gitcred.Repo) (username, password string, err error) {
	leave, err := s.seat(ctx)
	if err != nil {
		return "", "", err
	}
	defer leave()
	ctx, cancel := context.WithTimeout(ctx, credentialTime)
	defer cancel()
	reply, err := askCredential(ctx, s.spec.Daemon, s.spec.Agent, wire.CredentialQuery{Action: action, Protocol: "https", Host: repo.Host, Path: repo.Path})
	switch {
	case err != nil:
		return "", "", fmt.Errorf("the daemon does not answer: %w", err)
	case !reply.OK:
		return "", "", errors.New(oneLine(reply.Error))
	}
	return reply.Username, reply.Password, nil
}

// seat waits for one of the few places of those who ask outside.
func (s *Supervisor) seat(ctx context.Context) (leave func(), err error) {
	select {
	case s.commands <- struct{}{}:
		return func() { <-s.commands }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// credentialCommand runs the operator's command outside the boundary. It gets what git
// would give a helper on stdin; nothing of the request but the repository, normalised.
func (s *Supervisor) credentialCommand(ctx context.Context, argv []string, repo gitcred.Repo) (username, password string, err error) {
	leave, err := s.seat(ctx)
	if err != nil {
		return "", "", err
	}
	defer leave()
	if err := s.paced.wait(ctx); err != nil {
		return "", "", err
	}
	s.outside.Store(true)
	ctx, cancel := context.WithTimeout(ctx, credentialTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env, cmd.Dir = s.hostEnv(), "/"
	cmd.Stdin = strings.NewReader(fmt.Sprintf("protocol=https\nhost=%s\npath=%s\n\n", repo.Host, repo.Path))
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &bounded{b: &out, left: gitcred.MaxInput}, &bounded{b: &errs, left: 4 << 10, cut: true}
	cmd.WaitDelay = commandGrace
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	err = cmd.Run()
	if text := strings.TrimSpace(errs.String()); text != "" {
		s.opts.Log.Info(visible(oneLine(text)), "from", filepath.Base(argv[0]))
	}
	if err != nil {
		return "", "", fmt.Errorf("%s: %w", argv[0], err)
	}
	username, password, err = gitcred.ParseOutput(out.Bytes())
	if err != nil {
		return "", "", fmt.Errorf("%s: %w", argv[0], err)
	}
	return username, password, nil
}

// hostEnv is the environment of what the operator has run outside on behalf of the agent.
func (s *Supervisor) hostEnv() []string {
	env := []string{"HOME=" + s.spec.Policy.Home, "USER=" + s.spec.Policy.User, "LOGNAME=" + s.spec.Policy.User, "AGENTCONNECT_AGENT=" + s.spec.Agent}
	if s.spec.HostPath != "" {
		env = append(env, "PATH="+s.spec.HostPath)
	}
	for _, k := range []string{"LANG", "LANGUAGE", "LC_ALL", "TZ", "XDG_RUNTIME_DIR"} {
		if v, ok := os.LookupEnv(k); ok {
			env = append(env, k+"="+v)
		}
	}
	if run := os.Getenv("XDG_RUNTIME_DIR"); run != "" {
		env = append(env, "DBUS_SESSION_BUS_ADDRESS=unix:path="+run+"/bus") // a keyring is on it
	}
	return env
}

func (s *Supervisor) auditCredential(event string, q wire.CredentialQuery, repo, why string) {
	tool := "git"
	if q.Tool == "gh" {
		tool = "gh"
	}
	text := fmt.Sprintf("credentials for %s %s to %s", repo, event, tool)
	detail := map[string]string{"repository": repo, "tool": tool}
	if repo == "" {
		text = "a request for credentials refused"
		delete(detail, "repository")
	}
	if why != "" {
		text += ": " + oneLine(why)
	}
	s.audit.Asked(audit.Record{Kind: audit.KindCredential, Event: event, Text: text, Detail: detail})
}

// bounded keeps so many bytes; more is an error, or, with cut, dropped.
type bounded struct {
	b    *bytes.Buffer
	left int
	cut  bool
}

func (w *bounded) Write(p []byte) (int, error) {
	n := len(p)
	if n > w.left {
		if !w.cut {
			return 0, errors.New("it prints too much")
		}
		p = p[:w.left]
	}
	w.left -= len(p)
	w.b.Write(p)
	return n, nil
}
