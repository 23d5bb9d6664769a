//go:build !linux

package hostfacts

import (
	"io/fs"
	"os"
	"path/filepath"

	"agentconnect.md/sandbox/sandbox"
)

// Resolve follows every link and says what is there. No boundary is built on this
// system, so nothing depends on the two looks agreeing.
func (Host) Resolve(path string) (string, sandbox.Kind, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", "", err
	}
	st, err := os.Stat(real)
	if err != nil {
		return "", "", err
	}
	switch st.Mode() & fs.ModeType {
	case fs.ModeDir:
		return real, sandbox.KindDir, nil
	case 0:
		return real, sandbox.KindFile, nil
	case fs.ModeSocket:
		return real, sandbox.KindSocket, nil
	}
	return real, sandbox.KindOther, nil
}

// resolveIn is Resolve of each name in dir.
func (h Host) resolveIn(dir string, names []string, take func(real string, kind sandbox.Kind, err error)) {
	for _, name := range names {
		take(h.Resolve(filepath.Join(dir, name)))
	}
}
