package hostfacts

import (
	"path/filepath"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/pathfd"
)

// Resolve follows every link and says what is there, about one and the same inode.
func (Host) Resolve(path string) (string, sandbox.Kind, error) {
	fd, err := pathfd.Open(path)
	if err != nil {
		return "", "", err
	}
	defer unix.Close(fd)
	real, err := pathfd.Real(fd)
	if err != nil {
		return "", "", err
	}
	mode, err := pathfd.Mode(fd)
	if err != nil {
		return "", "", err
	}
	return real, kindOf(mode), nil
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

// resolveIn is Resolve of each name in dir, with one walk to dir.
func (h Host) resolveIn(dir string, names []string, take func(real string, kind sandbox.Kind, err error)) {
	fd, err := pathfd.Open(dir)
	var real string
	if err == nil {
		defer unix.Close(fd)
		real, err = pathfd.Real(fd)
	}
	if err != nil {
		take("", "", err)
		return
	}
	for _, name := range names {
		var st unix.Stat_t
		switch err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); {
		case err != nil:
			take("", "", err)
		case st.Mode&unix.S_IFMT == unix.S_IFLNK:
			take(h.Resolve(filepath.Join(real, name)))
		default:
			take(filepath.Join(real, name), kindOf(st.Mode), nil)
		}
	}
}
