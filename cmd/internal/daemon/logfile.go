package daemon

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Sizes at which a log starts over, bytes. The one before is kept as NAME.1.
const (
	daemonLogSize = 4 << 20
	agentLogSize  = 8 << 20
)

// logFile appends to a file, 0600, and keeps one older generation. A log that cannot be
// written must not stop an agent: such lines are lost, and the first loss is returned.
type logFile struct {
	path string
	max  int64

	mu   sync.Mutex
	f    *os.File
	size int64
}

func openLog(path string, size int64) (*logFile, error) {
	l := &logFile{path: path, max: size}
	if err := l.open(); err != nil {
		return nil, cannotWrite(path, err)
	}
	return l, nil
}

func (l *logFile) open() error {
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return err
	}
	l.f, l.size = f, st.Size()
	return nil
}

// Write appends p, whole lines, and never splits it over two generations.
func (l *logFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.f != nil && l.size > 0 && l.size+int64(len(p)) > l.max {
		l.f.Close()
		l.f = nil
		if err := os.Rename(l.path, l.path+".1"); err != nil && !errors.Is(err, os.ErrNotExist) {
			return 0, err
		}
	}
	if l.f == nil {
		if err := l.open(); err != nil {
			return 0, err
		}
	}
	n, err := l.f.Write(p)
	l.size += int64(n)
	return n, err
}

func (l *logFile) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.f == nil {
		return nil
	}
	err := l.f.Close()
	l.f = nil
	return err
}

// tee writes to both and hides the errors of the second: a full disk must not take
// the daemon's voice on stderr away.
type tee struct{ first, second io.Writer }

func (t tee) Write(p []byte) (int, error) {
	_, _ = t.second.Write(p)
	return t.first.Write(p)
}

// agentLogs opens the logs of agents, one file for each.
type agentLogs struct {
	dir string

	mu    sync.Mutex
	files map[string]*logFile
}

// AgentLog is the path of an agent's log below root.
func AgentLog(root, id string) string { return filepath.Join(root, "logs", "agents", id+".log") }

// Writer returns what takes the messages of one supervisor. Lines come out with the
// time, safe to print and bounded in length.
func (a *agentLogs) Writer(id string) io.WriteCloser {
	a.mu.Lock()
	defer a.mu.Unlock()
	f := a.files[id]
	if f == nil {
		f = &logFile{path: filepath.Join(a.dir, id+".log"), max: agentLogSize}
		a.files[id] = f
	}
	return &lineWriter{to: f, now: time.Now}
}

// Close closes all files.
func (a *agentLogs) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range a.files {
		_ = f.Close()
	}
}

// lineWriter cuts a stream into lines for a log.
type lineWriter struct {
	to   io.Writer
	now  func() time.Time
	rest []byte
}

// Write takes all of p and never fails: its writer is a program that must go on.
func (w *lineWriter) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		i := bytes.IndexByte(p, '\n')
		end := i
		if i < 0 {
			end = len(p)
		}
		// What exceeds the bound is dropped as it comes; memory stays bounded.
		if room := maxWord + 1 - len(w.rest); room > 0 {
			w.rest = append(w.rest, p[:min(end, room)]...)
		}
		if i < 0 {
			break
		}
		w.line()
		p = p[i+1:]
	}
	return n, nil
}

func (w *lineWriter) line() {
	text := printable(strings.TrimSuffix(string(w.rest), "\r"))
	w.rest = w.rest[:0]
	_, _ = io.WriteString(w.to, w.now().UTC().Format("2006-01-02T15:04:05.000Z")+" "+text+"\n")
}

// Close writes out a last line without its end.
func (w *lineWriter) Close() error {
	if len(w.rest) > 0 {
		w.line()
	}
	return nil
}

// Tail returns the last n lines of the file at path, of its last 64 KiB.
func Tail(path string, n int) ([]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return TailOf(f, st.Size(), n)
}

// TailOf is Tail of the first size bytes of f: what is written meanwhile follows them.
func TailOf(f io.ReaderAt, size int64, n int) ([]string, error) {
	const most = 64 << 10
	from := max(0, size-most)
	raw, err := io.ReadAll(io.NewSectionReader(f, from, size-from))
	if err != nil {
		return nil, err
	}
	if from > 0 { // the first line is cut
		_, raw, _ = bytes.Cut(raw, []byte("\n"))
	}
	lines := strings.Split(strings.TrimSuffix(string(raw), "\n"), "\n")
	if len(lines) == 1 && lines[0] == "" {
		return nil, nil
	}
	return lines[max(0, len(lines)-n):], nil
}
