// The folders of a git directory in which git on the host writes by names of its own: the message
// of a commit or a merge, FETCH_HEAD, the reflogs. git follows a link of such a name, and would
// write what the agent chose (a message, the name of a branch) wherever the user can. It makes
// no links there itself, so a new one is the agent's, whatever it is called.

package gitseal

import (
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox/pathfd"
)

// Bounds of what is looked through below one git directory.
const (
	maxInner      = 4096 // folders
	maxInnerDepth = 32
)

// elsewhere are folders of a git directory that need no look: what git writes in objects, refs
// and lfs are names and contents of its own, put there by rename; the others are sealed, or git
// directories by themselves.
var elsewhere = map[string]bool{"objects": true, "refs": true, "lfs": true, "hooks": true, "modules": true, "worktrees": true}

// IsInner reports whether a folder of that name in a git directory is one of those.
func IsInner(name string) bool { return !elsewhere[name] }

// Inner gives these folders below dir, itself the first, and the links in them; top: dir is the
// git directory itself.
func Inner(dir string, top bool) (folders, links []string) {
	at, err := pathfd.Directory(dir)
	if err != nil {
		return nil, nil // gone, or a link that somebody else finds
	}
	defer unix.Close(at)
	in := &inner{}
	in.list(at, ".", dir, top, 0)
	return in.folders, in.links
}

type inner struct {
	folders, links []string
	buf            [16 << 10]byte
}

func (in *inner) list(at int, name, path string, top bool, depth int) {
	if len(in.folders) >= maxInner || depth > maxInnerDepth {
		return
	}
	//nolint:forbidigo // one name in an open directory, and no link
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	in.folders = append(in.folders, path)
	var dirs []string
	_ = eachName(fd, in.buf[:], func(name []byte, typ byte) bool { // what cannot be listed holds nothing that git finds
		switch {
		case typ == unix.DT_LNK:
			in.links = append(in.links, path+"/"+string(name))
		case typ == unix.DT_DIR && !(top && elsewhere[string(name)]):
			dirs = append(dirs, string(name))
		}
		return true
	})
	for _, d := range dirs {
		in.list(fd, d, path+"/"+d, false, depth+1)
	}
}

// ConflictsFile is where git keeps which files have conflicts whose resolution it is to
// remember: "HASH[.N]\tPATH\0".
const ConflictsFile = "MERGE_RR"

// strayConflicts reports whether such a file names anything out of the working tree: git would
// copy what is there into the repository.
func strayConflicts(text string) bool {
	for record := range strings.SplitSeq(text, "\x00") {
		_, path, ok := strings.Cut(record, "\t")
		if ok && (!filepath.IsLocal(path) || strings.HasPrefix(path, ".git/")) {
			return true
		}
	}
	return false
}
