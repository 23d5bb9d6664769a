//go:build !linux

// Resolution of a path where the kernel does not tell a descriptor's name. Nothing is
// sandboxed there, so no path is judged against a hostile agent.

package acp

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

func resolve(path string) (resolved, error) {
	p, err := filepath.EvalSymlinks(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return resolved{}, errNotExist
		}
		return resolved{}, err
	}
	st, err := os.Lstat(p)
	if err != nil {
		return resolved{}, err
	}
	return resolved{path: p, dir: st.IsDir(), regular: st.Mode().IsRegular()}, nil
}

func resolveForNew(dir, name string) (resolved, error) {
	p, err := resolve(dir)
	if err != nil {
		return resolved{}, err
	}
	if _, err := os.Lstat(filepath.Join(p.path, name)); err == nil {
		return resolved{}, errors.New("is a link that leads nowhere")
	}
	return p, nil
}
