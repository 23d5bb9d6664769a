package logins

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/audit"
)

// pair is a host's home and a private home.
type pair struct {
	t             *testing.T
	kind          Kind
	base          string
	home, private string
	s             *Sync
}

func newPair(t *testing.T, k Kind) *pair {
	t.Helper()
	base := t.TempDir()
	p := &pair{t: t, kind: k, base: base, home: filepath.Join(base, "home"), private: filepath.Join(base, "private")}
	for _, d := range []string{p.home, p.private} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	h := hostOf(k)
	p.put(p.home, k.File(), h.login)
	if k == Claude {
		p.put(p.home, ".claude.json", h.account)
	}
	a, err := audit.New(base, "alice", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	if p.s, err = Open(k, p.home, p.private, slog.New(slog.DiscardHandler), a); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.s.Close)
	return p
}

// put writes as the runtimes do: another file, renamed.
func (p *pair) put(home, name string, b []byte) {
	p.t.Helper()
	path := filepath.Join(home, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		p.t.Fatal(err)
	}
	if err := os.WriteFile(path+".tmp", b, 0o644); err != nil {
		p.t.Fatal(err)
	}
	if err := os.Rename(path+".tmp", path); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pair) get(home string) string {
	b, err := os.ReadFile(filepath.Join(home, p.kind.File()))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func (p *pair) begin() {
	p.t.Helper()
	if err := p.s.Begin(); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pair) settle() {
	p.t.Helper()
	if err := p.s.Settle(); err != nil {
		p.t.Fatal(err)
	}
}

// events are the words of the audit log.
func (p *pair) events() string {
	b, err := os.ReadFile(audit.Path(p.base, "alice"))
	if err != nil {
		return ""
	}
	var out []string
	for _, l := range strings.Split(string(b), "\n") {
		if _, rest, ok := strings.Cut(l, `"event":"`); ok {
			word, _, _ := strings.Cut(rest, `"`)
			out = append(out, word)
		}
		if strings.Contains(l, "ort01") || strings.Contains(l, "refresh-") {
			p.t.Errorf("a token in the audit log: %s", l)
		}
	}
	return strings.Join(out, " ")
}

// fresh is a refresh of the host's login, as of now.
func fresh(k Kind, tag string) []byte {
	if k == Claude {
		return claudeFile(tag, time.Now().Add(8*time.Hour))
	}
	return codexFile(tag, "me", time.Now())
}

func TestLoginIsGivenRefreshedAndTakenAway(t *testing.T) {
	for _, k := range []Kind{Claude, Codex} {
		t.Run(string(k), func(t *testing.T) {
			p := newPair(t, k)
			p.begin()
			if got := p.get(p.private); !strings.Contains(got, "old") || !p.s.Given() {
				t.Fatalf("the agent has %s", got)
			}
			p.put(p.private, k.File(), fresh(k, "inside-"))
			p.settle()
			if got := p.get(p.home); !strings.Contains(got, "inside-") {
				t.Errorf("the refresh did not reach the host: %s", got)
			}
			if st, err := os.Stat(filepath.Join(p.home, k.File())); err != nil || st.Mode().Perm() != 0o600 {
				t.Errorf("%v %v", st, err)
			}
			p.put(p.home, k.File(), fresh(k, "host-"))
			p.settle()
			if got := p.get(p.private); !strings.Contains(got, "host-") {
				t.Errorf("the host's change did not reach the agent: %s", got)
			}
			if err := os.Remove(filepath.Join(p.home, k.File())); err != nil {
				t.Fatal(err)
			}
			p.settle()
			if got := p.get(p.private); !strings.Contains(got, "no such file") || p.s.Given() {
				t.Errorf("after the logout the agent has %s", got)
			}
			if got := p.events(); got != "login-given login-refreshed login-given login-removed" {
				t.Errorf("audit: %s", got)
			}
			left, _ := filepath.Glob(filepath.Join(p.base, "*", ".c*", ".*.*"))
			for _, f := range left {
				if filepath.Base(f) != ".credentials.json" {
					t.Errorf("left behind: %s", f)
				}
			}
		})
	}
}

// A refresh that nobody carried over, since the supervisor was gone, is not lost.
func TestRefreshOfAnEarlierRunGoesBackAtTheNextStart(t *testing.T) {
	p := newPair(t, Codex)
	p.put(p.private, Codex.File(), fresh(Codex, "inside-"))
	p.begin()
	if got := p.get(p.home); !strings.Contains(got, "inside-") {
		t.Errorf("the host has %s", got)
	}
}

func TestPlantedFilesNeverReachTheHostAndStopNothing(t *testing.T) {
	for _, k := range []Kind{Claude, Codex} {
		for name, plant := range map[string]func(p *pair, path string) error{
			"a link to the host's login": func(p *pair, path string) error { return os.Symlink(filepath.Join(p.home, k.File()), path) },
			"a link to a newer one outside": func(p *pair, path string) error {
				p.put(p.base, "newer", fresh(k, "planted-"))
				return os.Symlink(filepath.Join(p.base, "newer"), path)
			},
			"a folder": func(_ *pair, path string) error { return os.Mkdir(path, 0o700) },
			"a pipe":   func(_ *pair, path string) error { return syscall.Mkfifo(path, 0o600) },
			"a huge file": func(_ *pair, path string) error {
				f, err := os.Create(path)
				if err == nil {
					err = f.Truncate(1 << 40)
					f.Close()
				}
				return err
			},
			"text": func(_ *pair, path string) error { return os.WriteFile(path, []byte("planted-"), 0o600) },
			"the folder as a link": func(p *pair, path string) error {
				p.put(p.base, filepath.Join("out", filepath.Base(path)), fresh(k, "planted-"))
				if err := os.Remove(filepath.Dir(path)); err != nil {
					return err
				}
				return os.Symlink(filepath.Join(p.base, "out"), filepath.Dir(path))
			},
		} {
			t.Run(fmt.Sprintf("%s %s", k, name), func(t *testing.T) {
				p := newPair(t, k)
				before := p.get(p.home)
				p.begin()
				path := filepath.Join(p.private, k.File())
				if err := os.Remove(path); err != nil {
					t.Fatal(err)
				}
				if err := plant(p, path); err != nil {
					t.Fatal(err)
				}
				p.settle()
				if got := p.get(p.home); got != before {
					t.Errorf("the host has %s", got)
				}
				// The next start gives the login again, or says that it cannot; nothing lies outside.
				err := p.s.Begin()
				if got := p.get(p.home); got != before {
					t.Errorf("at the next start the host has %s", got)
				}
				if b, rerr := os.ReadFile(filepath.Join(p.base, "out", filepath.Base(path))); rerr == nil && !strings.Contains(string(b), "planted-") {
					t.Errorf("written outside the private home: %s", b)
				}
				if err == nil && !strings.Contains(p.get(p.private), "old") {
					t.Errorf("the agent has %s", p.get(p.private))
				}
				t.Logf("%v; %s", err, p.events())
			})
		}
	}
}

// said takes what is logged.
type said chan string

func (s said) Write(p []byte) (int, error) {
	s <- string(p)
	return len(p), nil
}

// An agent that puts a pipe in place of the folder holds nobody up who watches it: the end of the
// agent waits for the watch.
func TestAPipeInPlaceOfTheFolderDoesNotHoldTheWatch(t *testing.T) {
	for _, k := range []Kind{Claude, Codex} {
		t.Run(string(k), func(t *testing.T) {
			p := newPair(t, k)
			p.begin()
			dir := filepath.Join(p.private, filepath.Dir(k.File()))
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Mkfifo(dir, 0o600); err != nil {
				t.Fatal(err)
			}
			said := make(said, 100)
			p.s.log = slog.New(slog.NewTextHandler(said, nil))
			p.put(p.home, k.File(), fresh(k, "host-"))
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan struct{})
			go func() { p.s.Watch(ctx); close(ended) }()
			select {
			case <-said: // that the new login cannot be put there
			case <-time.After(20 * time.Second):
				t.Error("the watch looks at nothing")
			}
			cancel()
			select {
			case <-ended:
			case <-time.After(20 * time.Second):
				t.Error("the watch does not end")
				// Whoever waits for a writer is let go.
				if f, err := os.OpenFile(dir, os.O_WRONLY|syscall.O_NONBLOCK, 0); err == nil {
					f.Close()
				}
				<-ended
			}
		})
	}
}

// An agent that writes all the time, and much, gets a twentieth of a processor at most for looks at it,
// and is looked at once a minute at least.
func TestALongLookIsFollowedByALongPause(t *testing.T) {
	for spent, want := range map[time.Duration]time.Duration{0: rest, rest / 20: rest, time.Second: 20 * time.Second, time.Hour: time.Minute} {
		if got := pause(spent); got != want {
			t.Errorf("after %v it pauses for %v, want %v", spent, got, want)
		}
	}
}

func TestChangesAreSeenAsTheyCome(t *testing.T) {
	p := newPair(t, Claude)
	p.begin()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { p.s.Watch(ctx); close(ended) }()
	defer func() { cancel(); <-ended }()
	until := func(home, want string) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !strings.Contains(p.get(home), want); time.Sleep(20 * time.Millisecond) { //nolint:forbidigo // looked for with a deadline
			if time.Now().After(end) {
				t.Fatalf("never came: %s in %s: %s", want, home, p.get(home))
			}
		}
	}
	for i := range 3 {
		p.put(p.private, Claude.File(), claudeFile(fmt.Sprintf("inside-%d-", i), time.Now().Add(time.Duration(10+10*i)*time.Minute)))
		until(p.home, fmt.Sprintf("inside-%d-", i))
		p.put(p.home, Claude.File(), claudeFile(fmt.Sprintf("host-%d-", i), time.Now().Add(time.Duration(15+10*i)*time.Minute)))
		until(p.private, fmt.Sprintf("host-%d-", i))
	}
}
