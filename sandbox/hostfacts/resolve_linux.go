package hostfacts

import (
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
	switch mode {
	case unix.S_IFDIR:
		return real, sandbox.KindDir, nil
	case unix.S_IFREG:
		return real, sandbox.KindFile, nil
	case unix.S_IFSOCK:
		return real, sandbox.KindSocket, nil
	}
	return real, sandbox.KindOther, nil
}
