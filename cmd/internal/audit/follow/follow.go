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

// Log is an audit log that is read as it grows.
type Log struct {
	w *fsnotify.Watcher
	t tail
}

// Open opens the log at path, which need not exist yet; its directory must.
func Open(path string) (*Log, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	if err := w.Add(filepath.Dir(path)); err != nil {
		_ = w.Close()
		return nil, err
	}
	return &Log{w: w, t: tail{path: path}}, nil
}

// Close ends it.
func (l *Log) Close() {
	l.t.close()
	_ = l.w.Close()
}

// Past calls f for each line that there is, once, before Next.
func (l *Log) Past(f func(line []byte) error) error {
	files, err := audit.Files(l.t.path)
	if err != nil {
		return err
	}
	for i, file := range files {
		if l.t.file != nil {
			l.t.file.Close()
		}
		l.t.file = file // of the last one the rest comes later
		if l.t.rest, err = audit.Lines(file, nil, f); err != nil {
			for _, file := range files[i+1:] {
				file.Close()
			}
			return err
		}
	}
	return nil
}

// Next calls f for each line that follows, until ctx ends or f fails. It wakes up by events alone.
func (l *Log) Next(ctx context.Context, f func(line []byte) error) error {
	l.t.f = f
	for {
		select {
		case <-ctx.Done():
			return nil
		case err, ok := <-l.w.Errors:
			if !ok {
				return nil
			}
			if !errors.Is(err, fsnotify.ErrEventOverflow) { // what was lost is read all the same
				return err
			}
		case event, ok := <-l.w.Events:
			if !ok {
				return nil
			}
			if event.Name != l.t.path {
				continue
			}
		}
		if err := l.t.read(); err != nil {
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
