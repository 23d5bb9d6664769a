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

// placeOf follows every link.
func (h Host) placeOf(name string) place {
	real, kind, err := h.Resolve(name)
	return place{real: real, kind: kind, links: 1, err: err}
}

// resolveIn is placeOf each name in dir.
func (h Host) resolveIn(dir string, names []string, take func(name string, p place)) {
	for _, name := range names {
		take(filepath.Join(dir, name), h.placeOf(filepath.Join(dir, name)))
	}
}

// boundTo knows nothing here.
func boundTo() map[string][]uint32 { return nil }
