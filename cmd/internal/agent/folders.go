// Which folders outside ROOT agents can write. Each start asks, so a file is read again only
// when it has changed: with 500 agents all of them would be read 500 times.

package agent

import (
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox"
)

// settled is how old a file's last change must be for what was read to be kept: a change right
// after it may leave the same time.
const settled = 2 * time.Second

// folders are those of one agent, as its file named them.
type folders struct {
	file identity
	list []string
}

// identity is different for each content of a path, once it is settled.
type identity struct {
	dev, ino        uint64
	size            int64
	changed, status unix.Timespec
}

// Folders gives the absolute folders, clean and links not resolved, that the store's agents may
// write by their configuration: workspaces and writable grants. A broken agent has none.
func (s *Store) Folders() ([]string, error) {
	des, err := os.ReadDir(s.dir)
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	s.folderMu.Lock()
	defer s.folderMu.Unlock()
	now := map[string]folders{}
	var all []string
	for _, de := range des {
		id := de.Name()
		if strings.HasPrefix(id, ".") || ValidateID(id) != nil {
			continue
		}
		if a := s.Held(id); a != nil {
			all = append(all, a.Folders()...)
			continue
		}
		// Looked at before it is read: a change in between is seen by the next look.
		var st unix.Stat_t
		if unix.Lstat(s.Dirs(id).File, &st) != nil {
			continue
		}
		file := identity{dev: uint64(st.Dev), ino: st.Ino, size: st.Size, changed: st.Mtim, status: st.Ctim} //nolint:unconvert // not everywhere of that type
		known, ok := s.folders[id]
		if !ok || known.file != file {
			known = folders{file: file}
			if a, err := s.Load(id); err == nil {
				known.list = a.Folders()
			}
		}
		if st.Mode&unix.S_IFMT == unix.S_IFREG && time.Since(time.Unix(st.Ctim.Unix())) > settled {
			now[id] = known
		}
		all = append(all, known.list...)
	}
	s.folders = now
	return all, nil
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
