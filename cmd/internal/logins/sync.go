package logins

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/atomicfile"
	"agentconnect.md/sandbox/cmd/internal/audit"
)

// Sync keeps an agent's copy of a login and the host's in step. It is used by one goroutine at
// a time.
type Sync struct {
	kind    Kind
	home    string   // of the daemon's user
	private *os.Root // the agent's home: what lies in it is the agent's
	audit   *audit.Log
	log     *slog.Logger

	host, agent sum // what was dealt with last
	given       bool
	warned      bool
}

type sum [sha256.Size]byte

// Open makes a Sync between the real home and the private one, as the host names it. A nil
// audit log drops.
func Open(kind Kind, home, private string, log *slog.Logger, a *audit.Log) (*Sync, error) {
	root, err := os.OpenRoot(private)
	if err != nil {
		return nil, fmt.Errorf("private home: %w", err)
	}
	return &Sync{kind: kind, home: home, private: root, log: log, audit: a}, nil
}

// Close lets go of the private home.
func (s *Sync) Close() { s.private.Close() }

func (s *Sync) hostPath() string { return filepath.Join(s.home, s.kind.File()) }

// Given reports whether the agent has the host's login.
func (s *Sync) Given() bool { return s.given }

// Begin gives the agent the host's login, before its runtime starts. A refresh that an earlier
// run left behind goes back first.
func (s *Sync) Begin() error { return s.settle(true) }

// Settle deals with what changed since the last time.
func (s *Sync) Settle() error { return s.settle(false) }

func (s *Sync) settle(begin bool) error {
	host := files{login: s.hostLogin()}
	agent := files{login: s.read(s.kind.File(), MaxSize)}
	hostSum, agentSum := sumOf(host.login), sumOf(agent.login)
	hostNew, agentNew := begin || hostSum != s.host, begin || agentSum != s.agent
	if !hostNew && !agentNew {
		return nil
	}
	s.host, s.agent = hostSum, agentSum
	if host.login == nil {
		if s.given {
			// The user logged out, and so does the agent.
			s.given = false
			if err := s.private.Remove(s.kind.File()); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("login of the agent: %w", err)
			}
			s.agent = sumOf(nil)
			s.record("login-removed", "the host's login is gone, and the agent's copy with it")
		}
		return nil
	}
	if name := s.kind.accountFile(); name != "" {
		agent.account = s.read(name, maxAccount)
		host.account = readFile(func() (*os.File, error) { return os.Open(filepath.Join(s.home, name)) }, maxAccount)
	}
	if agent.login != nil && agentNew {
		merged, err := s.kind.back(agent, host, time.Now())
		switch {
		case err == nil:
			return s.takeBack(host, merged)
		case errors.Is(err, errSame):
			s.given = true
		case !begin:
			s.record("login-refused", "the agent's login stays inside: "+err.Error())
		}
	}
	if !hostNew {
		return nil
	}
	return s.give(host, agent.account)
}

// takeBack replaces the host's login by the refreshed one, unless it changed meanwhile.
func (s *Sync) takeBack(host files, merged []byte) error {
	path, err := filepath.EvalSymlinks(s.hostPath()) //nolint:forbidigo // the user's own link in the user's own home, where no agent writes
	if err != nil {
		return err
	}
	if string(s.hostLogin()) != string(host.login) {
		s.agent = sum{} // judged anew when the host's change is seen
		return nil
	}
	if err := atomicfile.Write(path, merged, 0o600); err != nil {
		return err
	}
	s.host, s.given = sumOf(merged), true
	s.record("login-refreshed", "the agent refreshed the login, and the host has it")
	return nil
}

// give puts the host's login into the private home.
func (s *Sync) give(host files, account []byte) error {
	login, err := s.kind.forAgent(host.login)
	if err != nil {
		return fmt.Errorf("%s: %w", s.hostPath(), err)
	}
	if name := s.kind.accountFile(); name != "" && host.account != nil {
		account, err := accountFor(account, host.account)
		if err != nil {
			s.log.Warn("the agent is not told whose login it has", "reason", err)
		} else if err := atomicfile.WriteIn(s.private, name, account, 0o600); err != nil {
			return err
		}
	}
	if err := s.private.MkdirAll(filepath.Dir(s.kind.File()), 0o700); err != nil {
		return err
	}
	if err := atomicfile.WriteIn(s.private, s.kind.File(), login, 0o600); err != nil {
		return err
	}
	s.agent, s.given = sumOf(login), true
	s.record("login-given", "the agent has a copy of the host's login")
	return nil
}

func (s *Sync) record(event, text string) {
	s.log.Info(text, "login", string(s.kind))
	s.audit.Asked(audit.Record{Kind: audit.KindCredential, Event: event, Path: s.hostPath(), Text: text})
}

func (s *Sync) hostLogin() []byte {
	return readFile(func() (*os.File, error) { return os.Open(s.hostPath()) }, MaxSize)
}

// read reads a file of the agent's: no link leads out of its home, and what is no plain file,
// or too large, counts as not there.
func (s *Sync) read(name string, most int64) []byte {
	return readFile(func() (*os.File, error) { return s.private.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) }, most)
}

func readFile(open func() (*os.File, error), most int64) []byte {
	f, err := open()
	if err != nil {
		return nil
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() || st.Size() > most {
		return nil
	}
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil || int64(len(b)) > most || len(b) == 0 {
		return nil
	}
	return b
}

func sumOf(b []byte) sum {
	if b == nil {
		return sum{}
	}
	return sha256.Sum256(b)
}
