package hostfacts

import (
	"path/filepath"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/pathfd"
)

// Resolve follows every link and says what is there, about one and the same inode.
func (Host) Resolve(path string) (string, sandbox.Kind, error) {
	p := look(path)
	if p.err != nil {
		return "", "", p.err
	}
	return p.real, p.kind, nil
}

func look(path string) place {
	fd, err := pathfd.Open(path)
	if err != nil {
		return place{err: err}
	}
	defer unix.Close(fd)
	real, err := pathfd.Real(fd)
	if err != nil {
		return place{err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return place{err: err}
	}
	return placeAt(real, &st)
}

func placeAt(real string, st *unix.Stat_t) place {
	return place{real: real, kind: kindOf(st.Mode), ino: st.Ino, links: uint64(st.Nlink)} //nolint:unconvert // not everywhere of that type
}

// placeOf follows every link.
func (Host) placeOf(name string) place {
	p := look(name)
	if p.err != nil {
		p.real = reached(name)
	}
	return p
}

// reached is the last on the way to a path that can be reached.
func reached(path string) string {
	for ; ; path = filepath.Dir(path) {
		if p := look(path); p.err == nil || path == "/" || path == "." {
			return p.real
		}
	}
}

func kindOf(mode uint32) sandbox.Kind {
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return sandbox.KindDir
	case unix.S_IFREG:
		return sandbox.KindFile
	case unix.S_IFSOCK:
		return sandbox.KindSocket
	}
	return sandbox.KindOther
}

// resolveIn is placeOf each name in dir, with one walk to dir.
func (Host) resolveIn(dir string, names []string, take func(name string, p place)) {
	fd, err := pathfd.Open(dir)
	var real string
	if err == nil {
		defer unix.Close(fd)
		real, err = pathfd.Real(fd)
	}
	if err != nil {
		take(dir, place{real: reached(dir), err: err})
		return
	}
	for _, base := range names {
		name := filepath.Join(dir, base)
		var st unix.Stat_t
		switch err := unix.Fstatat(fd, base, &st, unix.AT_SYMLINK_NOFOLLOW); {
		case err != nil:
			take(name, place{real: real, err: err})
		case st.Mode&unix.S_IFMT == unix.S_IFLNK:
			p := look(filepath.Join(real, base))
			if p.err != nil {
				p.real = real // the link lies there
			}
			take(name, p)
		default:
			take(name, placeAt(filepath.Join(real, base), &st))
		}
	}
}
