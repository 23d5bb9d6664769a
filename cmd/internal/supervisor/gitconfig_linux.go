// A few harmless variables of sealed git configurations, changed for the agent where the
// operator allowed it. What is asked comes from inside; what is written is checked in package
// gitseal, and written while the agent is halted: in the moment between the rename and the next
// seal it could put its own file there, git's empty lock for instance. git's lock keeps out
// the host's own git.

package supervisor

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox/gitseal"
	"agentconnect.md/sandbox/sandbox/pathfd"
)

// gitConfig changes one variable.
func (s *Supervisor) gitConfig(conn *net.UnixConn, q wire.GitSetting) error {
	err := s.changeConfig(q)
	event, text := "config", "set for the agent: "+q.Key+" = "+q.Value
	if q.Unset {
		text = "taken away for the agent: " + q.Key
	}
	if err != nil {
		event, text = "config-refused", "refused to set for the agent: "+q.Key+": "+err.Error()
	}
	s.audit.Asked(audit.Record{Kind: audit.KindPolicy, Event: event, Path: q.Dir, Text: oneLine(text), Detail: map[string]string{"key": oneLine(q.Key), "value": oneLine(q.Value)}})
	if err != nil {
		return err
	}
	return answerGuest(conn, wire.GuestReply{OK: true})
}

func (s *Supervisor) changeConfig(q wire.GitSetting) error {
	set := gitseal.Setting{Key: q.Key, Value: q.Value, Unset: q.Unset}
	group, err := set.Check()
	switch {
	case err != nil:
		return err
	case !slices.Contains(s.spec.GitConfig, group):
		return fmt.Errorf("%s is not allowed for this agent; its operator can: `agentconnect agent edit %s --git-config '%s'`", group, s.spec.Agent, group)
	case s.audit == nil:
		return errors.New("nothing is changed without an audit log; see the agent's log")
	}
	s.mu.Lock()
	found := s.found
	s.mu.Unlock()
	// By a name that we found ourselves, and never by one that is told.
	if found == nil || !slices.ContainsFunc(found.Repositories, func(r gitseal.Repository) bool { return r.Sealed && r.Common == q.Dir }) {
		return fmt.Errorf("%s is no sealed repository of this agent; in one made since its start `git config` itself works", q.Dir)
	}
	s.configMu.Lock()
	defer s.configMu.Unlock()
	if s.guard == nil {
		return errors.New("nothing is sealed: the agent can change it itself")
	}
	err = s.guard.Change(filepath.Join(q.Dir, "config"), func() error {
		return rewriteConfig(q.Dir, s.spec.Policy.AgentDir, func(text string) (string, error) { return gitseal.Edit(text, set) })
	})
	var errno unix.Errno
	if errors.As(err, &errno) {
		s.opts.Log.Error("a git configuration could not be changed", "path", q.Dir, "error", err)
	}
	return err
}

// rewriteConfig changes the file config in dir, under git's lock. The new one is made in aside,
// or, on another file system, in the sealed hooks, where no agent writes.
func rewriteConfig(dir, aside string, edit func(string) (string, error)) (err error) {
	root, err := pathfd.Open("/")
	if err != nil {
		return err
	}
	defer unix.Close(root)
	at, err := pathfd.Absolute(root, dir, unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	//nolint:forbidigo // one new name in an open directory: O_EXCL follows no link
	lock, err := unix.Openat(at, "config.lock", unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if errors.Is(err, unix.EEXIST) {
		return errors.New("config.lock exists: something changes the configuration; try again")
	}
	if err != nil {
		return err
	}
	defer unix.Close(lock)
	defer func() { err = errors.Join(err, unlock(at, lock)) }()
	text, mode, err := readConfig(at)
	if err != nil {
		return err
	}
	changed, err := edit(text)
	if err != nil || changed == text {
		return err
	}
	for _, place := range []string{aside, filepath.Join(dir, "hooks")} {
		if err = replaceConfig(root, place, at, changed, mode); !errors.Is(err, unix.EXDEV) {
			return err
		}
	}
	return err
}

// unlock takes our lock away, if it is still ours.
func unlock(at, lock int) error {
	var ours, there unix.Stat_t
	if err := unix.Fstat(lock, &ours); err != nil {
		return err
	}
	if err := unix.Fstatat(at, "config.lock", &there, unix.AT_SYMLINK_NOFOLLOW); err != nil || there.Ino != ours.Ino || there.Dev != ours.Dev {
		return nil //nolint:nilerr // somebody else's by now
	}
	return unix.Unlinkat(at, "config.lock", 0)
}

func readConfig(at int) (text string, mode uint32, err error) {
	// Never waiting: the agent stands still meanwhile.
	//nolint:forbidigo // one name in an open directory, no link
	fd, err := unix.Openat(at, "config", unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", 0, &os.PathError{Op: "open", Path: "config", Err: err}
	}
	f := os.NewFile(uintptr(fd), "config")
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return "", 0, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return "", 0, errors.New("config is no regular file")
	}
	b, err := io.ReadAll(io.LimitReader(f, gitseal.MaxConfig+1))
	if err == nil && len(b) > gitseal.MaxConfig {
		err = errors.New("config is too long")
	}
	return string(b), st.Mode & 0o777, err
}

func replaceConfig(root int, place string, at int, text string, mode uint32) error {
	from, err := pathfd.Absolute(root, place, unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	name := ".config." + rand.Text()
	//nolint:forbidigo // one new name in an open directory: O_EXCL follows no link
	fd, err := unix.Openat(from, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.WriteString(text)
	err = cmp.Or(err, f.Chmod(os.FileMode(mode)), f.Sync())
	if err = cmp.Or(err, f.Close()); err == nil {
		err = unix.Renameat(from, name, at, "config")
	}
	if err != nil {
		_ = unix.Unlinkat(from, name, 0)
	}
	return err
}
