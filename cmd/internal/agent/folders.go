// What all agents' files say. Each start asks which folders outside ROOT agents can write, and each
// status for all of it, so a file is read again only when it has changed: with 500 agents all of
// them would be read 500 times.

package agent

import (
	"os"
	"path/filepath"
	"strings"

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
