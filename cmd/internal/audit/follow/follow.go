// Package follow reads an audit log as it grows. It is apart from package audit, so that
// the supervisor, which only writes, does not link a watcher.
package follow

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/fsnotify/fsnotify"

	"agentconnect.md/sandbox/cmd/internal/audit"
)

// Lines calls f for each line appended to the log at path from now on, until ctx ends or f
// fails. The log need not exist yet; its directory must. It wakes up by events alone.
func Lines(ctx context.Context, path string, f func(line []byte) error) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer func() { _ = w.Close() }()
	if err := w.Add(filepath.Dir(path)); err != nil {
		return err
	}
	t := &tail{path: path, f: f}
	defer t.close()
	if err := t.open(); err != nil {
		return err
	}
	if t.file != nil {
		if _, err := t.file.Seek(0, 2); err != nil {
			return err
		}
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case err, ok := <-w.Errors:
			if !ok {
				return nil
			}
			if !errors.Is(err, fsnotify.ErrEventOverflow) { // what was lost is read all the same
				return err
			}
		case event, ok := <-w.Events:
			if !ok {
				return nil
			}
			if event.Name != path {
				continue
			}
		}
		if err := t.read(); err != nil {
			return err
		}
	}
}

type tail struct {
	path string
	f    func([]byte) error
	file *os.File
	rest []byte
}

func (t *tail) open() error {
	f, err := os.Open(t.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	t.file = f
	return err
}

func (t *tail) close() {
	if t.file != nil {
		t.file.Close()
		t.file = nil
	}
}

// read reads what is new, and goes on with the new file after a rotation.
func (t *tail) read() error {
	for {
		if t.file == nil {
			if err := t.open(); err != nil || t.file == nil {
				return err
			}
		}
		rest, err := audit.Lines(t.file, t.rest, t.f)
		if err != nil {
			return err
		}
		t.rest = rest
		here, err := t.file.Stat()
		if err != nil {
			return err
		}
		if at, err := t.file.Seek(0, io.SeekCurrent); err != nil || at > here.Size() {
			// Somebody emptied it: what is written from now on begins anew.
			if _, err = t.file.Seek(0, io.SeekStart); err != nil {
				return err
			}
			t.rest = t.rest[:0]
			continue
		}
		named, err := os.Stat(t.path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // between two renames
		}
		if err != nil {
			return err
		}
		if os.SameFile(here, named) {
			return nil
		}
		// Rotated: nothing is appended to the old file after its rename, and all of it is read.
		if _, err = audit.Lines(t.file, t.rest, t.f); err != nil {
			return err
		}
		next := t.after(here)
		t.close()
		t.rest = t.rest[:0]
		t.file = next
	}
}

// after opens the file that followed the rotated one; nil for the newest.
func (t *tail) after(old os.FileInfo) *os.File {
	for i := audit.Kept; i > 1; i-- {
		st, err := os.Stat(fmt.Sprintf("%s.%d", t.path, i))
		if err != nil || !os.SameFile(st, old) {
			continue
		}
		if f, err := os.Open(fmt.Sprintf("%s.%d", t.path, i-1)); err == nil {
			return f
		}
	}
	return nil
}
