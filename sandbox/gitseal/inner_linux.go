// The folders of a git directory in which git on the host writes, or removes, by names of its own:
// the message of a commit or a merge, FETCH_HEAD, the reflogs, a graph of commits, what worktrees
// that are gone left. git follows a link of such a name, and would write what the agent chose (a
// message, the name of a branch) wherever the user can, or remove what lies there. It makes no
// links there itself, so a new one is the agent's, whatever it is called.

package gitseal

import (
	"cmp"
	"errors"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox/pathfd"
)

// Bounds of what is looked through below one git directory.
const (
	maxInner      = 8192 // folders
	maxInnerDepth = 64
)

// Branches is the folder of a git directory in which a file NAME is the address of the remote NAME
// that the configuration has not: origin, for a git that is told none.
const Branches = "branches"

// written are those of a git directory in which git itself writes: looked at first, and to the end.
var written = []string{"logs", "info", "rebase-merge", "rebase-apply", "sequencer", Resolutions, "NOTES_MERGE_WORKTREE", "objects", "worktrees"}

// Folder is one of those.
type Folder struct {
	Path string
	Role Role
}

// Inside is what Inner found.
type Inside struct {
	Folders []Folder
	Links   []string
	// Blind are folders that it could not look at though git could: what lies there is not known.
	Blind []string
}

// Inner gives these folders below dir, itself the first, and the links in them. A folder that its
// owner may not list or enter is made one that he may: git finds a name there without a list, and
// the guard would not.
func Inner(dir string, role Role) Inside {
	at, err := pathfd.Directory(dir)
	if err != nil {
		if errors.Is(err, unix.EACCES) {
			return Inside{Blind: []string{dir}}
		}
		return Inside{} // gone, or a link that somebody else finds
	}
	defer unix.Close(at)
	in := &inner{buf: make([]byte, 16<<10)}
	in.list(at, dir, role, role != GitDir, 0)
	return in.Inside
}

type inner struct {
	Inside
	buf []byte
}

// list looks at the folder that the O_PATH descriptor at is open on. must: git may write there.
func (in *inner) list(at int, path string, role Role, must bool, depth int) {
	if len(in.Folders) >= maxInner || depth > maxInnerDepth {
		if must {
			in.Blind = append(in.Blind, path)
		}
		return
	}
	fd, err := openList(at)
	if err != nil {
		if mine(at) {
			in.Blind = append(in.Blind, path)
		}
		return
	}
	defer unix.Close(fd)
	in.Folders = append(in.Folders, Folder{path, role})
	var dirs []string
	_ = eachName(fd, in.buf, func(name []byte, typ byte) bool {
		switch _, look := role.Below(string(name)); {
		case typ == unix.DT_LNK:
			in.Links = append(in.Links, path+"/"+string(name))
		case typ == unix.DT_DIR && look:
			dirs = append(dirs, string(name))
		}
		return true
	})
	if role == Worktrees && len(dirs) > maxAdmin {
		in.Blind = append(in.Blind, path)
		return
	}
	if role == GitDir { // an agent could fill others until nothing is left for these
		slices.SortStableFunc(dirs, func(a, b string) int { return cmp.Compare(rank(a), rank(b)) })
	}
	for _, d := range dirs {
		//nolint:forbidigo // one name in an open directory, and no link
		sub, err := unix.Openat(fd, d, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err == nil {
			in.below(sub, path, d, role, must, depth)
			unix.Close(sub)
		} else if errors.Is(err, unix.EACCES) && mine(fd) {
			in.Blind = append(in.Blind, path)
			return
		}
	}
}

// below looks at the folder name in path, which is of that role.
func (in *inner) below(at int, path, name string, role Role, must bool, depth int) {
	sub, _ := role.Below(name)
	if sub != GitDir {
		in.list(at, path+"/"+name, sub, must || role == GitDir && rank(name) == 0, depth+1)
		return
	}
	// A linked worktree, with bounds of its own.
	w := &inner{buf: in.buf}
	w.list(at, path+"/"+name, sub, false, 0)
	in.Folders, in.Links, in.Blind = append(in.Folders, w.Folders...), append(in.Links, w.Links...), append(in.Blind, w.Blind...)
}

func rank(name string) int {
	if slices.Contains(written, name) {
		return 0
	}
	return 1
}

// openList opens a folder for reading; one of the user's own is made one that he may use.
func openList(at int) (int, error) {
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return -1, err
	}
	if st.Mode&0o700 != 0o700 && mine(at) {
		if err := unix.Chmod("/proc/self/fd/"+strconv.Itoa(at), st.Mode&0o7777|0o700); err != nil {
			return -1, err
		}
	}
	//nolint:forbidigo // the open directory itself
	return unix.Openat(at, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
}

// mine reports whether a folder is the user's, so that an agent may have made it what it is.
func mine(at int) bool {
	var st unix.Stat_t
	return unix.Fstat(at, &st) == nil && int(st.Uid) == unix.Geteuid()
}

// What git remembers of conflicts: which files have some whose resolution it is to take down
// ("HASH[.N]\tPATH\0"), in a git directory, and what it took down, in the one they share.
const (
	ConflictsFile = "MERGE_RR"
	Resolutions   = "rr-cache"
)
