// What all agents' files say. Each start asks which folders outside ROOT agents can write, and each
// status for all of it, so a file is read again only when it has changed: with 500 agents all of
// them would be read 500 times. Starts that come close together share one look at whether they have.

package agent

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/fileid"
	"agentconnect.md/sandbox/sandbox"
)

// parsed is one agent, as its file was.
type parsed struct {
	file  fileid.ID
	agent *Agent
}

// Folders gives the absolute folders, clean and links not resolved, that the store's agents may
// write by their configuration: workspaces and writable grants. A broken agent has none.
func (s *Store) Folders() ([]string, error) {
	des, err := os.ReadDir(s.dir)
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	var all []string
	for _, de := range des {
		id := de.Name()
		if strings.HasPrefix(id, ".") || ValidateID(id) != nil {
			continue
		}
		if a, err := s.unchanged(id); err == nil {
			all = append(all, a.Folders()...)
		}
	}
	return all, nil
}

// shared is for how many times as long as a look at all files took what it saw is used, though no
// longer than sharedAtMost: of many starts one after another, looks take a fiftieth.
const (
	shared       = 50
	sharedAtMost = time.Second
)

// Writable are folders that agents may write. It is not to be changed.
type Writable struct {
	All []string // clean and absolute; links are not resolved

	is    map[string]bool // the same
	until time.Time
}

// Has reports whether a folder is one of them.
func (w *Writable) Has(folder string) bool { return w.is[folder] }

// WritableFor is Folders for a start of a, and may be a moment old. It has the folders of each agent
// that this Store was asked for before, as that started: who can have written something in a folder
// since then is not missed.
func (s *Store) WritableFor(a *Agent) (*Writable, error) {
	s.writableMu.Lock()
	defer s.writableMu.Unlock()
	own, began := a.Folders(), s.now()
	if w := s.writable; w != nil && began.Before(w.until) && !slices.ContainsFunc(own, func(f string) bool { return !w.is[f] }) {
		return w, nil
	}
	all, err := s.Folders()
	if err != nil {
		return nil, err
	}
	w := &Writable{All: append(all, own...), is: map[string]bool{}}
	for _, f := range w.All {
		w.is[f] = true
	}
	ended := s.now()
	w.until = ended.Add(min(shared*ended.Sub(began), sharedAtMost))
	s.writable = w
	return w, nil
}

// LookAgain has the next start look at all files: one is known to have changed.
func (s *Store) LookAgain() {
	s.writableMu.Lock()
	defer s.writableMu.Unlock()
	s.writable = nil
}

// unchanged is Load for one who changes nothing of what he gets: others get the same.
func (s *Store) unchanged(id string) (*Agent, error) {
	if a := s.Held(id); a != nil {
		return a, nil
	}
	// Looked at before it is read: a change in between is seen by the next look.
	var st unix.Stat_t
	if unix.Lstat(s.Dirs(id).File, &st) != nil {
		s.keep(id, nil)
		return s.Load(id)
	}
	file := fileid.Of(&st)
	s.parsedMu.Lock()
	known := s.parsed[id]
	s.parsedMu.Unlock()
	if known != nil && known.file == file {
		return known.agent, nil
	}
	a, err := s.Load(id)
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || !file.Settled() {
		s.keep(id, nil)
		return a, err
	}
	s.keep(id, &parsed{file: file, agent: a})
	return a, nil
}

// keep remembers what a file said; nil: nothing.
func (s *Store) keep(id string, p *parsed) {
	s.parsedMu.Lock()
	defer s.parsedMu.Unlock()
	if p == nil {
		delete(s.parsed, id)
		return
	}
	if s.parsed == nil {
		s.parsed = map[string]*parsed{}
	}
	s.parsed[id] = p
}

// Folders gives the absolute folders outside its directory that the agent may write.
func (a *Agent) Folders() []string {
	var out []string
	if filepath.IsAbs(a.Workspace) {
		out = append(out, filepath.Clean(a.Workspace))
	}
	for _, g := range a.Grants {
		if g.Access == sandbox.ReadWrite {
			out = append(out, filepath.Clean(g.Path))
		}
	}
	return out
}
