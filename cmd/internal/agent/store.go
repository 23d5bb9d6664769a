// The store of agents below ROOT. Whoever changes something holds the store's lock,
// so that two command lines lose no change of each other; readers need no lock,
// since a file is replaced whole.

package agent

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/atomicfile"
)

var (
	// ErrNotFound is an id without an agent: exit code 66.
	ErrNotFound = errors.New("no such agent")
	// ErrExists is an id that is taken.
	ErrExists = errors.New("agent exists")
	// ErrBusy is a lock that another process holds for too long: exit code 75.
	ErrBusy = errors.New("agents are being changed by another process")
)

// Store is the directory ROOT/agents. The zero value is of no use; see NewStore.
// Its methods may be called at the same time from several goroutines and processes.
type Store struct {
	root     string // ROOT
	dir      string // ROOT/agents
	lockWait time.Duration

	// held are agents whose configuration is somebody else's to keep, and is on no disk.
	mu   sync.Mutex
	held map[string]*Agent

	parsedMu sync.Mutex
	parsed   map[string]*parsed // by id

	writableMu sync.Mutex
	writable   *Writable // as last looked at
	now        func() time.Time
}

// Hold keeps a configuration in memory alone: of an agent that a control plane placed here,
// whose secrets must not rest on disk. It is this Store's; another process does not see it.
// The agent is not to be changed afterwards.
func (s *Store) Hold(a *Agent) error {
	if err := a.Validate(); err != nil {
		return err
	}
	defer s.LookAgain()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held == nil {
		s.held = map[string]*Agent{}
	}
	s.held[a.ID] = a
	return nil
}

// Release forgets a held configuration.
func (s *Store) Release(id string) {
	defer s.LookAgain()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.held, id)
}

// Held returns a held configuration, or nil.
func (s *Store) Held(id string) *Agent {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held[id]
}

// NewStore gives the store below root, which package config has checked. It touches
// nothing.
func NewStore(root string) *Store {
	return &Store{root: root, dir: filepath.Join(root, "agents"), lockWait: 10 * time.Second, now: time.Now}
}

// Dirs are the places of one agent, on the host. Home, Memory, Tmp and Workspace are
// writable for the agent: whoever opens something below them must not follow links.
type Dirs struct {
	Agent     string
	File      string // agent.json
	Home      string
	Memory    string
	Tmp       string
	Workspace string // of an agent that names no other
	// Repository is what an agent's own clone was made from and pushes to. The agent cannot
	// write it.
	Repository string
}

// Dirs names the places of the agent id. It touches nothing; an id that breaks the
// rule gives the zero value, so that no such id becomes a path.
func (s *Store) Dirs(id string) Dirs {
	if ValidateID(id) != nil {
		return Dirs{}
	}
	d := filepath.Join(s.dir, id)
	return Dirs{
		Agent: d, File: filepath.Join(d, "agent.json"),
		Home: filepath.Join(d, "home"), Memory: filepath.Join(d, "memory"),
		Tmp: filepath.Join(d, "tmp"), Workspace: filepath.Join(d, DefaultWorkspace),
		Repository: filepath.Join(d, "repository.git"),
	}
}

// WorkspacePath is the agent's workspace on the host, absolute. Links in it are not
// resolved, and a relative one is not yet proved to stay inside the agent directory.
func (s *Store) WorkspacePath(a *Agent) string {
	switch {
	case a.Workspace == "":
		return s.Dirs(a.ID).Workspace
	case filepath.IsAbs(a.Workspace):
		return a.Workspace
	}
	return filepath.Join(s.Dirs(a.ID).Agent, a.Workspace)
}

// Entry is one agent of a list. Exactly one of Agent and Err is set.
type Entry struct {
	ID    string
	Agent *Agent
	Err   error
}

// List gives all agents by id. A broken one is an entry with its error and stops no
// other; a directory without agent.json is no agent. No ROOT means no agents. The agents
// are not the caller's to change.
func (s *Store) List() ([]Entry, error) {
	des, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list agents: %w", err)
	}
	var list []Entry
	for _, de := range des {
		id := de.Name()
		if strings.HasPrefix(id, ".") {
			continue
		}
		e := Entry{ID: id}
		if err := ValidateID(id); err != nil {
			if _, serr := os.Lstat(filepath.Join(s.dir, id, "agent.json")); serr != nil {
				continue
			}
			e.Err = fmt.Errorf("%s: %w", filepath.Join(s.dir, id), err)
		} else if e.Agent, e.Err = s.unchanged(id); errors.Is(e.Err, ErrNotFound) {
			continue
		}
		list = append(list, e)
	}
	s.parsedMu.Lock()
	defer s.parsedMu.Unlock()
	maps.DeleteFunc(s.parsed, func(id string, _ *parsed) bool {
		_, there := slices.BinarySearchFunc(list, id, func(e Entry, id string) int { return strings.Compare(e.ID, id) })
		return !there
	})
	return list, nil
}

// Load reads and checks one agent. Errors are ErrNotFound, ErrInvalid, or of the
// file system.
func (s *Store) Load(id string) (*Agent, error) {
	if err := ValidateID(id); err != nil {
		return nil, err
	}
	if a := s.Held(id); a != nil {
		return a, nil
	}
	path := s.Dirs(id).File
	data, err := ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return nil, fmt.Errorf("%w: %s: agentconnect agent list names the agents there are", ErrNotFound, id)
	case err != nil:
		return nil, err
	}
	a, err := Parse(data)
	if err == nil {
		err = a.Validate()
	}
	if err == nil && a.ID != id {
		err = fmt.Errorf("%w: id is %q in the directory of %q: make them the same", ErrInvalid, a.ID, id)
	}
	if err == nil && a.Checkout != nil {
		err = fmt.Errorf("%w: checkout is for agents that a control plane places", ErrInvalid)
	}
	if err == nil && slices.ContainsFunc(a.GitCredentials, func(c GitCredential) bool { return c.ControlPlane }) {
		err = fmt.Errorf("%w: gitCredentials: controlPlane is for agents that a control plane places; name a secret or a command", ErrInvalid)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return a, nil
}

// ReadFile reads an agent's file: a regular one, not through a link, at most MaxSize
// bytes, which only its owner (or root) may have written. It never blocks on a FIFO.
func ReadFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if errors.Is(err, syscall.ELOOP) {
		return nil, fmt.Errorf("%w: %s: is a link, which is not followed; put the file itself there", ErrInvalid, path)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() {
		return nil, fmt.Errorf("%w: %s: is not a regular file; put the agent's JSON there", ErrInvalid, path)
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok && st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return nil, fmt.Errorf("%w: %s: belongs to uid %d, not to you (uid %d); chown it, or remove it", ErrInvalid, path, st.Uid, os.Geteuid())
	}
	if fi.Mode().Perm()&0o022 != 0 {
		return nil, fmt.Errorf("%w: %s: others may write to it (mode %04o); look at it, then chmod 600 %s", ErrInvalid, path, fi.Mode().Perm(), path)
	}
	data, err := io.ReadAll(io.LimitReader(f, MaxSize+1))
	if err != nil {
		return nil, err
	}
	if len(data) > MaxSize {
		return nil, fmt.Errorf("%w: %s: larger than %d bytes", ErrInvalid, path, MaxSize)
	}
	return data, nil
}

// Create writes a new agent and makes its directories. A directory that was left by
// Remove is used again. Errors are ErrExists, ErrInvalid, ErrBusy, or
// *atomicfile.Error.
func (s *Store) Create(a *Agent) error {
	if err := a.Validate(); err != nil {
		return err
	}
	if err := s.makeDir(s.dir); err != nil {
		return err
	}
	unlock, err := s.lock()
	if err != nil {
		return err
	}
	defer unlock()
	d := s.Dirs(a.ID)
	if _, err := os.Lstat(d.File); err == nil {
		return fmt.Errorf("%w: %s: change it with agentconnect agent edit, or choose another id", ErrExists, a.ID)
	}
	if err := s.Ensure(a.ID); err != nil {
		return err
	}
	return s.write(a)
}

// LeftName is the file in an agent's directory that says which agent of a control plane left it. It
// goes as soon as the directory is used.
const LeftName = "left.json"

// Ensure makes the agent's directories where they are missing. What is there stays
// as it is; what is there and is neither a directory nor a link is an error. A link
// in their place is for the policy's maker to resolve and judge.
func (s *Store) Ensure(id string) error {
	if err := ValidateID(id); err != nil {
		return err
	}
	d := s.Dirs(id)
	for _, dir := range []string{s.dir, d.Agent, d.Home, d.Memory, d.Tmp, d.Workspace} {
		if err := s.makeDir(dir); err != nil {
			return err
		}
	}
	// Whoever left it has no claim to what another one does there from here on.
	// Looked for before, since on a read-only file system its absence could not be told.
	left := filepath.Join(d.Agent, LeftName)
	if _, err := os.Lstat(left); err == nil {
		return os.Remove(left)
	}
	return nil
}

func (s *Store) makeDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	if err == nil {
		return nil
	}
	if !errors.Is(err, fs.ErrExist) {
		return atomicfile.Explain("make directory", dir, err)
	}
	fi, err := os.Lstat(dir)
	if err != nil {
		return atomicfile.Explain("make directory", dir, err)
	}
	isAgentDir := filepath.Dir(dir) == s.dir || dir == s.dir
	switch {
	case fi.IsDir():
		return nil
	case fi.Mode()&fs.ModeSymlink != 0 && !isAgentDir:
		return nil
	}
	return fmt.Errorf("%w: %s: is not a directory; move it away", ErrInvalid, dir)
}

// Update loads the agent id, lets change alter it, checks and writes it, all under
// the lock, and gives the agent as written. When change or the check fails the old
// file stays. change must not ask a person: others wait for the lock.
func (s *Store) Update(id string, change func(*Agent) error) (*Agent, error) {
	if err := ValidateID(id); err != nil {
		return nil, err
	}
	// Before the lock: looking for what is not there must not need a writable ROOT.
	if _, err := s.Load(id); err != nil {
		return nil, err
	}
	unlock, err := s.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	a, err := s.Load(id)
	if err != nil {
		return nil, err
	}
	if err := change(a); err != nil {
		return nil, err
	}
	if a.ID != id {
		return nil, fmt.Errorf("%w: the id of an agent cannot change (%s to %s): add another agent", ErrInvalid, id, a.ID)
	}
	if err := a.Validate(); err != nil {
		return nil, err
	}
	return a, s.write(a)
}

func (s *Store) write(a *Agent) error {
	data, err := a.Encode()
	if err != nil {
		return err
	}
	// What is written must be readable again, whoever built the value.
	if _, err := Parse(data); err != nil {
		return err
	}
	return atomicfile.Write(s.Dirs(a.ID).File, data, 0o600)
}

// Remove takes the agent out of the configuration. Without purge only agent.json
// goes; with purge the whole agent directory does, also one that an earlier Remove
// left. The caller has stopped the agent.
func (s *Store) Remove(id string, purge bool) error {
	if err := ValidateID(id); err != nil {
		return err
	}
	d := s.Dirs(id)
	notFound := fmt.Errorf("%w: %s: agentconnect agent list names the agents there are", ErrNotFound, id)
	if _, err := os.Lstat(d.Agent); errors.Is(err, fs.ErrNotExist) {
		return notFound
	}
	unlock, err := s.lock()
	if err != nil {
		return err
	}
	defer unlock()
	agents, err := os.OpenRoot(s.dir)
	if err != nil {
		return atomicfile.Explain("remove", d.Agent, err)
	}
	defer agents.Close()
	err = agents.Remove(filepath.Join(id, "agent.json"))
	if errors.Is(err, fs.ErrNotExist) && !purge {
		return notFound
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return atomicfile.Explain("remove", d.File, err)
	}
	if !purge {
		return syncDir(d.Agent)
	}
	// Out of the way first: a new agent of this id then never meets a half-removed one.
	trash := "." + id + "." + rand.Text()
	if err := agents.Rename(id, trash); err != nil {
		return atomicfile.Explain("remove", d.Agent, err)
	}
	if err := s.discard(agents, trash); err != nil {
		return fmt.Errorf("remove %s: %w; the agent is gone from the configuration; remove the rest with: rm -rf %s", d.Agent, err, filepath.Join(s.dir, trash))
	}
	return syncDir(s.dir)
}

// discard removes a directory that is out of the way.
func (s *Store) discard(agents *os.Root, trash string) error {
	if agents.RemoveAll(trash) == nil {
		return nil
	}
	// The agent may have taken the owner's rights from its own directories.
	openUp(filepath.Join(s.dir, trash))
	return agents.RemoveAll(trash)
}

// RemoveServers takes away what an agent's MCP servers with a boundary of their own kept below root.
func RemoveServers(root, id string) error {
	if err := ValidateID(id); err != nil {
		return err
	}
	dir := filepath.Join(root, "mcp")
	servers, err := os.OpenRoot(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		defer servers.Close()
		if err = servers.RemoveAll(id); err != nil {
			openUp(filepath.Join(dir, id)) // as discard does
			err = servers.RemoveAll(id)
		}
	}
	if err != nil {
		return atomicfile.Explain("remove", filepath.Join(dir, id), err)
	}
	return nil
}

// Sweep removes what a Remove with purge left that was cut short: nobody sees it any more, and it
// holds what the agent had.
func (s *Store) Sweep() error {
	des, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	left := slices.DeleteFunc(des, func(de fs.DirEntry) bool {
		id, text, _ := strings.Cut(strings.TrimPrefix(de.Name(), "."), ".")
		return de.Name()[0] != '.' || ValidateID(id) != nil || len(text) != len(rand.Text()) || !de.IsDir()
	})
	if len(left) == 0 {
		return nil
	}
	unlock, err := s.lock() // who holds it may be removing one of them
	if err != nil {
		return err
	}
	defer unlock()
	agents, err := os.OpenRoot(s.dir)
	if err != nil {
		return err
	}
	defer agents.Close()
	for _, de := range left {
		if derr := s.discard(agents, de.Name()); derr != nil {
			err = errors.Join(err, fmt.Errorf("%w; what an agent left that is gone is still there; remove it with: rm -rf %s", derr, filepath.Join(s.dir, de.Name())))
		}
	}
	return err
}

// openUp gives the owner back the rights on every directory below dir, following no link.
func openUp(dir string) {
	// Errors are not kept: the removal that follows meets and reports them.
	_ = filepath.WalkDir(dir, func(path string, de fs.DirEntry, _ error) error {
		if de != nil && de.IsDir() {
			_ = chmodNoFollow(path, 0o700) // before WalkDir reads it
		}
		return nil
	})
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return atomicfile.Explain("write", dir, err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOTSUP) {
		return atomicfile.Explain("write", dir, err)
	}
	return nil
}

// lock takes the store's lock. The file stays: removing it would let two holders in.
func (s *Store) lock() (unlock func(), err error) {
	path := filepath.Join(s.dir, ".lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, atomicfile.Explain("lock", path, err)
	}
	deadline := time.Now().Add(s.lockWait)
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !slices.Contains([]error{syscall.EWOULDBLOCK, syscall.EINTR}, err) {
			f.Close()
			return nil, atomicfile.Explain("lock", path, err)
		}
		if time.Now().After(deadline) {
			f.Close()
			return nil, fmt.Errorf("%w: %s is locked (fuser -v %s names the process); try again", ErrBusy, path, path)
		}
		time.Sleep(10 * time.Millisecond) //nolint:forbidigo // flock(2) waits without a deadline or not at all
	}
}
