// Package audit is the record of what happened to one agent's boundary: denials, git
// findings, policy changes, credentials handed out. One JSON object a line, appended with
// one write, so that the supervisor and the daemon may both write; rotated by size.
package audit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/fileid"
)

// Kinds of records. The words are stable: scripts select by them.
const (
	KindPolicy     = "policy"     // the operator changed what the agent may touch
	KindGit        = "git"        // a git control file, or what looks like one
	KindTrusted    = "trusted"    // a file that a program of the host trusts
	KindDenied     = "denied"     // the boundary refused something
	KindSecret     = "secret"     // a secret was set, removed or handed in; never its value
	KindCredential = "credential" // a credential helper answered, or refused to
	KindPush       = "push"       // an agent with a clone of its own pushed
	KindMCP        = "mcp"        // a server outside the boundary started or ended
	KindLife       = "life"       // start, stop, end
)

// Record is one line of an agent's audit log.
type Record struct {
	Time  time.Time `json:"time"`
	Agent string    `json:"agent"`
	Kind  string    `json:"kind"`
	// Event is a stable word within its kind, "seal-lost" for instance.
	Event string `json:"event"`
	// Path is the file concerned, as the host names it; invalid UTF-8 is quoted by Append.
	Path string `json:"path,omitempty"`
	// Text says it to a person, in one line.
	Text string `json:"text"`
	// Detail has what a program may want besides.
	Detail map[string]string `json:"detail,omitempty"`
}

// MaxSize is the size in bytes at which a log is rotated; Kept older files stay.
const (
	MaxSize = 8 << 20
	Kept    = 3
)

// MaxLine bounds one record in bytes, as written.
const MaxLine = 64 << 10

// File is an append-only file of JSON lines that rotates itself. Any number of processes
// may append to the same one. The zero value is not usable; see Open.
type File struct {
	path string
	max  int64

	mu sync.Mutex
	f  *os.File
}

// Path is where the audit log of an agent lies below ROOT.
func Path(root, agent string) string {
	return filepath.Join(root, "logs", "agents", agent+".audit.jsonl")
}

// EgressPath is where the record of an agent's connections lies below ROOT.
func EgressPath(root, agent string) string {
	return filepath.Join(root, "logs", "agents", agent+".egress.jsonl")
}

// Open opens the file for appending; it is made (0600, its directory 0700) when missing.
func Open(path string) (*File, error) { return OpenSize(path, MaxSize) }

// OpenSize is Open with another size, in bytes, at which the file is rotated.
func OpenSize(path string, most int64) (*File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("audit log: %w", err)
	}
	a := &File{path: path, max: most}
	if err := a.reopen(); err != nil {
		return nil, fmt.Errorf("audit log: %w", err)
	}
	return a, nil
}

func (a *File) reopen() error {
	f, err := os.OpenFile(a.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	if a.f != nil {
		a.f.Close()
	}
	a.f = f
	return nil
}

// Append writes each of records as one line, all with one write. A record larger than MaxLine
// is an error, and the others are written; nothing is cut in the middle.
func (a *File) Append(records ...any) error {
	var lines []byte
	var wrong []error
	for _, r := range records {
		line, err := json.Marshal(r)
		switch {
		case err != nil:
			wrong = append(wrong, err)
		case len(line) >= MaxLine:
			wrong = append(wrong, fmt.Errorf("audit log: a record of %d bytes is too long (at most %d)", len(line), MaxLine))
		default:
			lines = append(append(lines, line...), '\n')
		}
	}
	if len(lines) > 0 {
		wrong = append(wrong, a.append(lines))
	}
	return errors.Join(wrong...)
}

// append writes whole lines.
func (a *File) append(lines []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.f == nil {
		return fs.ErrClosed
	}
	// Shared among writers, exclusive for whoever rotates: no line goes to a file that was
	// rotated away meanwhile.
	for {
		if err := unix.Flock(int(a.f.Fd()), unix.LOCK_SH); err != nil {
			return err
		}
		size, named, err := a.look()
		if err == nil && named && size < a.max {
			_, err = a.f.Write(lines)
			return errors.Join(err, unix.Flock(int(a.f.Fd()), unix.LOCK_UN))
		}
		_ = unix.Flock(int(a.f.Fd()), unix.LOCK_UN)
		switch {
		case err != nil:
		case named:
			err = a.rotate()
		default:
			err = a.reopen()
		}
		if err != nil {
			return err
		}
	}
}

// look returns the size of the open file, and whether it is the one of that name.
func (a *File) look() (size int64, named bool, err error) {
	var here, there unix.Stat_t
	if err := unix.Fstat(int(a.f.Fd()), &here); err != nil {
		return 0, false, err
	}
	err = unix.Lstat(a.path, &there)
	if errors.Is(err, unix.ENOENT) {
		return here.Size, false, nil
	}
	return here.Size, here.Dev == there.Dev && here.Ino == there.Ino, err
}

// rotate renames the file away, unless somebody else was faster.
func (a *File) rotate() error {
	fd := int(a.f.Fd())
	if err := unix.Flock(fd, unix.LOCK_EX); err != nil {
		return err
	}
	defer func() { _ = unix.Flock(fd, unix.LOCK_UN) }()
	if _, named, err := a.look(); err != nil || !named {
		return err // rotated already: the next look opens the new one
	}
	for i := Kept; i > 0; i-- {
		from := a.path
		if i > 1 {
			from = fmt.Sprintf("%s.%d", a.path, i-1)
		}
		if err := os.Rename(from, fmt.Sprintf("%s.%d", a.path, i)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Close closes the file; Append fails from then on.
func (a *File) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.f == nil {
		return nil
	}
	f := a.f
	a.f = nil
	return f.Close()
}

// What an agent can have recorded as often as it likes would push everything else out of the
// log: so many bytes of it at once, and so many a second, are recorded one by one.
const (
	askedBurst = 1 << 20
	askedRate  = 32
)

// Log is the audit log of one agent. A nil Log drops what it is told.
type Log struct {
	agent string
	file  *File
	// failed is told once when a record could not be written.
	failed func(error)
	once   sync.Once

	mu   sync.Mutex
	left float64   // bytes for Asked
	at   time.Time // when left was that much
	over map[over]int
}

// over is a kind of record that is counted meanwhile.
type over struct{ kind, event string }

// New opens the audit log of an agent below root. failed is called once, when a record
// cannot be written (a full disk): what it was about goes on.
func New(root, agent string, failed func(error)) (*Log, error) {
	f, err := Open(Path(root, agent))
	if err != nil {
		return nil, err
	}
	return &Log{agent: agent, file: f, failed: failed, left: askedBurst, at: time.Now(), over: map[over]int{}}, nil
}

// Add records r; Time and Agent are filled in. Bytes that are no UTF-8 and control
// characters in the path are written as a quoted string. What is too long is cut.
func (l *Log) Add(r Record) {
	if l != nil {
		l.write(l.finished(r))
	}
}

// Asked is Add for what the agent brings about by asking. Of what it asks too often the number
// is recorded.
func (l *Log) Asked(r Record) {
	if l == nil {
		return
	}
	r = l.finished(r)
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	l.left = min(askedBurst, l.left+now.Sub(l.at).Seconds()*askedRate)
	l.at = now
	all := append(l.overs(), r)
	n := float64(length(all...))
	if n > l.left {
		l.over[over{r.Kind, r.Event}]++
		return
	}
	l.left -= n
	clear(l.over)
	for _, r := range all {
		l.write(r)
	}
}

// overs says what was counted and not recorded. l.mu is held.
func (l *Log) overs() []Record {
	var out []Record
	for o, n := range l.over {
		out = append(out, l.finished(Record{
			Kind: o.kind, Event: "more", Text: fmt.Sprintf("%d more (%s), not recorded one by one: the agent asks too often", n, o.event),
			Detail: map[string]string{"event": o.event, "count": strconv.Itoa(n)},
		}))
	}
	return out
}

func length(records ...Record) (n int) {
	for _, r := range records {
		if b, err := json.Marshal(r); err == nil {
			n += len(b) + 1
		}
	}
	return n
}

// most is the length that texts of a record are cut to when it is too long, in bytes.
const most = 1 << 10

func (l *Log) finished(r Record) Record {
	r.Time, r.Agent = time.Now().UTC(), l.agent
	r.Path = Printable(r.Path)
	if length(r) < MaxLine {
		return r
	}
	r.Path, r.Text = cut(r.Path), cut(r.Text)
	detail := map[string]string{}
	for k, v := range r.Detail {
		detail[k] = cut(v)
	}
	r.Detail = detail
	return r
}

func cut(text string) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

func (l *Log) write(r Record) {
	if err := l.file.Append(r); err != nil && l.failed != nil {
		l.once.Do(func() { l.failed(err) })
	}
}

// Close closes the log.
func (l *Log) Close() error {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	for _, r := range l.overs() {
		l.write(r)
	}
	clear(l.over)
	l.mu.Unlock()
	return l.file.Close()
}

// Printable returns path, quoted as Go quotes strings when it has bytes that are no UTF-8
// or that a terminal would act on.
func Printable(path string) string {
	if utf8.ValidString(path) && !strings.ContainsFunc(path, unicode.IsControl) {
		return path
	}
	return strconv.Quote(path)
}

// Read calls f for each whole line of the log at path and of its older files, oldest
// first. A log that does not exist has no lines. What is no JSON object is skipped: a full disk
// or a crash may have cut one.
func Read(path string, f func(line []byte) error) error {
	files, err := Files(path)
	if err != nil {
		return err
	}
	for len(files) > 0 && err == nil {
		_, err = Lines(files[0], nil, f)
		files[0].Close()
		files = files[1:]
	}
	closeAll(files)
	return err
}

// Files opens the log at path and its older files, oldest first. The caller closes them. The newest
// is opened first: of a log that is rotated meanwhile each file is there, and once.
func Files(path string) ([]*os.File, error) {
	var files []*os.File
	var seen []os.FileInfo
	for i := range Kept + 1 {
		name := path
		if i > 0 {
			name = fmt.Sprintf("%s.%d", path, i)
		}
		file, err := os.Open(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var st os.FileInfo
		if err == nil {
			files = append(files, file)
			st, err = file.Stat()
		}
		if err != nil {
			closeAll(files)
			return nil, err
		}
		if slices.ContainsFunc(seen, func(is os.FileInfo) bool { return os.SameFile(is, st) }) {
			files = files[:len(files)-1]
			file.Close()
		}
		seen = append(seen, st)
	}
	slices.Reverse(files)
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// Lines calls f for each whole line of rest and then r, up to the end of r, and returns what
// follows the last newline: the rest of the next call.
func Lines(r io.Reader, rest []byte, f func([]byte) error) ([]byte, error) {
	return lines(r, rest, func(line []byte) error {
		if line = record(line); line == nil {
			return nil
		}
		return f(line)
	})
}

// recordStart is how every record begins. In a text its quotes would have a backslash before them.
var recordStart = []byte(`{"time":"`)

// record is the record in a line; nil where there is none. What a full disk cut, or a crash, ends
// without a newline: the next record stands behind it.
func record(line []byte) []byte {
	if line[0] == '{' && json.Valid(line) {
		return line
	}
	if i := bytes.LastIndex(line, recordStart); i > 0 && json.Valid(line[i:]) {
		return line[i:]
	}
	return nil
}

// lines is Lines, whatever a line holds.
func lines(r io.Reader, rest []byte, f func([]byte) error) ([]byte, error) {
	chunk := make([]byte, 32<<10)
	for {
		n, err := r.Read(chunk)
		rest = append(rest, chunk[:n]...)
		for {
			i := bytes.IndexByte(rest, '\n')
			if i < 0 {
				break
			}
			if line := rest[:i]; len(line) > 0 {
				if err := f(line); err != nil {
					return nil, err
				}
			}
			rest = rest[i+1:]
		}
		if len(rest) > 2*MaxLine {
			rest = rest[:0] // no line of ours
		}
		if err == io.EOF {
			return rest, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// Counts gives Findings, and reads only the logs that changed since it read them.
type Counts struct {
	mu   sync.Mutex
	seen map[string]count // by path
}

// count is what a log held as it was then.
type count struct {
	log fileid.ID
	n   int
}

// Findings is as the function of that name.
func (c *Counts) Findings(path string) int {
	// Looked at before it is read: a change in between is seen by the next look.
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		c.mu.Lock()
		delete(c.seen, path)
		c.mu.Unlock()
		return Findings(path)
	}
	log := fileid.Of(&st)
	c.mu.Lock()
	was, ok := c.seen[path]
	c.mu.Unlock()
	if ok && was.log == log {
		return was.n
	}
	n := Findings(path)
	if log.Settled() {
		c.mu.Lock()
		if c.seen == nil {
			c.seen = map[string]count{}
		}
		c.seen[path] = count{log, n}
		c.mu.Unlock()
	}
	return n
}

// Forget is said of a log whose agent is gone.
func (c *Counts) Forget(path string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.seen, path)
}

// counted are the kinds of records that Findings has to do with, as they stand in a line: a
// quote in a text has a backslash before it.
var counted = [][]byte{[]byte(`"kind":"` + KindLife + `"`), []byte(`"kind":"` + KindGit + `"`), []byte(`"kind":"` + KindTrusted + `"`)}

// Findings counts the records about git and trusted files since the agent's last start, in
// the newest file of the log: what a person should look at.
func Findings(path string) int {
	f, err := os.Open(path)
	if err != nil {
		return 0
	}
	defer f.Close()
	n := 0
	_, _ = lines(f, nil, func(line []byte) error {
		if !slices.ContainsFunc(counted, func(kind []byte) bool { return bytes.Contains(line, kind) }) {
			return nil
		}
		var r Record
		if json.Unmarshal(line, &r) != nil {
			r = Record{}
			if json.Unmarshal(record(line), &r) != nil {
				r = Record{} // written by another version: nothing to count
			}
		}
		switch {
		case r.Kind == KindLife && r.Event == "start":
			n = 0
		case r.Kind == KindTrusted || r.Kind == KindGit && r.Event != "seal-restored":
			n++
		}
		return nil
	})
	return n
}
