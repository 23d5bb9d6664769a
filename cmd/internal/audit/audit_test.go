package audit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/fileid"
)

func records(t *testing.T, path string) []Record {
	t.Helper()
	var out []Record
	err := Read(path, func(line []byte) error {
		var r Record
		if err := json.Unmarshal(line, &r); err != nil {
			return err
		}
		out = append(out, r)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestRecordsAreReadBackInOrder(t *testing.T) {
	root := t.TempDir()
	l, err := New(root, "alice", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.Add(Record{Kind: KindGit, Event: "seal-lost", Path: "/w/a\x1b[2Jb\xff", Text: "one"})
	l.Add(Record{Kind: KindPolicy, Event: "changed", Text: "two", Detail: map[string]string{"k": "v"}})
	got := records(t, Path(root, "alice"))
	if len(got) != 2 || got[0].Text != "one" || got[1].Detail["k"] != "v" || got[0].Agent != "alice" || got[0].Time.IsZero() {
		t.Fatalf("read back %+v", got)
	}
	if strings.ContainsAny(got[0].Path, "\x1b") || got[0].Path != `"/w/a\x1b[2Jb\xff"` {
		t.Errorf("path %q, want it quoted", got[0].Path)
	}
	st, err := os.Stat(Path(root, "alice"))
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", st.Mode(), err)
	}
}

// Writers in different processes are different files here: each has its own descriptor.
func TestNoLineIsLostWhenManyWritersRotate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.jsonl")
	const writers, each = 8, 50
	var wg sync.WaitGroup
	for w := range writers {
		f, err := OpenSize(path, 16<<10)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		wg.Go(func() {
			for i := range each {
				if err := f.Append(Record{Kind: "test", Text: fmt.Sprintf("%d/%d", w, i)}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	seen := map[string]bool{}
	for _, r := range records(t, path) {
		if seen[r.Text] {
			t.Errorf("%s twice", r.Text)
		}
		seen[r.Text] = true
	}
	// 400 records of 70 bytes and more are at most 3 older files and this one.
	if len(seen) != writers*each {
		t.Errorf("%d records of %d", len(seen), writers*each)
	}
	if _, err := os.Stat(path + ".1"); err != nil {
		t.Errorf("nothing was rotated: %v", err)
	}
}

func TestOldFilesGo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.jsonl")
	f, err := OpenSize(path, 100)
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if err := f.Append(Record{Text: strings.Repeat("x", 100)}); err != nil {
			t.Fatal(err)
		}
	}
	f.Close()
	if _, err := os.Stat(fmt.Sprintf("%s.%d", path, Kept+1)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an older file than %d stayed: %v", Kept, err)
	}
	if err := f.Append(1); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("append to a closed log: %v", err)
	}
}

func TestATornLineIsSkipped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.jsonl")
	text := `{"text":"one"}` + "\n" + `{"text":"tw` + "\n" + "17\n\n" + `{"text":"three"}` + "\n" + `{"text":"unfinished"`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	got := records(t, path)
	if len(got) != 2 || got[0].Text != "one" || got[1].Text != "three" {
		t.Errorf("got %+v", got)
	}
}

// A full disk cuts a record where it ends; what is written once there is room again is not lost
// with it.
func TestARecordBehindOneThatAFullDiskCutIsRead(t *testing.T) {
	root := t.TempDir()
	path := Path(root, "alice")
	failures := 0
	log, err := New(root, "alice", func(error) { failures++ })
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	log.Add(Record{Kind: KindLife, Event: "start", Text: "one"})
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	signal.Ignore(syscall.SIGXFSZ)
	defer signal.Reset(syscall.SIGXFSZ)
	limit := syscall.Rlimit{Cur: uint64(st.Size()) + 40, Max: was.Max}
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	log.Add(Record{Kind: KindGit, Event: "lost", Text: "cut"})
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	if failures != 1 {
		t.Errorf("control: %d failures to write", failures)
	}
	log.Add(Record{Kind: KindGit, Event: "seal-lost", Text: `two {"time":"x"}`})
	log.Add(Record{Kind: KindGit, Event: "seal-lost", Text: "three"})
	var got []string
	for _, r := range records(t, path) {
		got = append(got, r.Text)
	}
	if want := []string{"one", `two {"time":"x"}`, "three"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if n := Findings(path); n != 2 {
		t.Errorf("%d findings, want 2", n)
	}
}

func TestTooLongIsAnErrorAndKeepsNothingElseOut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.jsonl")
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Append("before", strings.Repeat("x", MaxLine), "after"); err == nil {
		t.Error("a record of 64 KiB was taken")
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := string(b), "\"before\"\n\"after\"\n"; got != want {
		t.Errorf("the log has %q, want %q", got, want)
	}
}

func TestALinkInThePlaceOfTheLogIsRefused(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink(filepath.Join(dir, "elsewhere"), filepath.Join(dir, "a.jsonl")); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(filepath.Join(dir, "a.jsonl")); err == nil {
		t.Error("the link was followed")
	}
}

func TestAFailedWriteIsSaidOnce(t *testing.T) {
	said := 0
	l, err := New(t.TempDir(), "a", func(error) { said++ })
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	l.Add(Record{})
	l.Add(Record{})
	if said != 1 {
		t.Errorf("said %d times", said)
	}
	var none *Log
	none.Add(Record{}) // a nil log drops it
	if none.Close() != nil {
		t.Error("closing no log failed")
	}
}

func FuzzLines(f *testing.F) {
	f.Add([]byte("{}\n{\"a\":1}\nx"), 3)
	f.Fuzz(func(t *testing.T, data []byte, cut int) {
		if cut < 0 || cut > len(data) {
			cut = 0
		}
		var whole, parts []string
		rest, err := Lines(strings.NewReader(string(data)), nil, func(l []byte) error { whole = append(whole, string(l)); return nil })
		if err != nil {
			t.Fatal(err)
		}
		keep := func(l []byte) error { parts = append(parts, string(l)); return nil }
		r1, _ := Lines(strings.NewReader(string(data[:cut])), nil, keep)
		r2, _ := Lines(strings.NewReader(string(data[cut:])), r1, keep)
		if fmt.Sprint(whole) != fmt.Sprint(parts) || len(data) < MaxLine && string(rest) != string(r2) {
			t.Errorf("cut at %d: %q %q, whole %q %q", cut, parts, r2, whole, rest)
		}
	})
}

func TestCountsAreThoseOfTheLogAsItIsNow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	c := &Counts{}
	write := func(path string, findings int) {
		t.Helper()
		line := fmt.Sprintf(`{"kind":%q}`+"\n", KindTrusted)
		// Of one size, however many there are.
		text := strings.Repeat(line, findings) + strings.Repeat(strings.Replace(line, KindTrusted, strings.Repeat("x", len(KindTrusted)), 1), 9-findings)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := func(what string, n int) {
		t.Helper()
		if got := c.Findings(path); got != n {
			t.Errorf("%s: %d findings, want %d", what, got, n)
		}
	}
	// kept has the log's count kept as another one, so that it shows where that is used.
	kept := func() {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			t.Fatal(err)
		}
		c.seen = map[string]count{path: {fileid.Of(&st), 99}}
	}
	want("no log", 0)
	for n := range 5 { // changes that may leave the same time
		write(path, n)
		want("written just now", n)
	}
	kept()
	want("not changed since", 99)
	write(path+".new", 7)
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	want("replaced", 7)
	kept()
	if err := os.Chtimes(path, time.Now(), time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	want("given another time", 7)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	want("rotated away", 0)
	if len(c.seen) > 0 {
		t.Error("something is kept of a log that is not there")
	}
	write(path, 1)
	kept()
	if c.Forget(path); len(c.seen) > 0 {
		t.Error("something is kept of a log whose agent is gone")
	}
}

// An agent chooses how often it asks, and with which words.
func TestWhatAnAgentAsksForPushesNothingOutOfItsLog(t *testing.T) {
	root := t.TempDir()
	l, err := New(root, "alice", func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	l.Add(Record{Kind: KindLife, Event: "start", Text: "started"})
	l.Add(Record{Kind: KindGit, Event: "seal-lost", Text: "a finding"})
	const asked, size = 5000, 9 << 10
	for i := range asked {
		l.Asked(Record{Kind: KindCredential, Event: "refused", Text: fmt.Sprint(i, strings.Repeat("x", size))})
	}
	if n := Findings(Path(root, "alice")); n != 1 {
		t.Errorf("status counts %d findings", n)
	}
	l.Add(Record{Kind: KindGit, Event: "seal-lost", Text: "another"})
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	told, findings := 0, 0
	for _, r := range records(t, Path(root, "alice")) {
		switch {
		case r.Event == "refused":
			told++
		case r.Event == "more" && r.Detail["event"] == "refused":
			n, err := strconv.Atoi(r.Detail["count"])
			if err != nil || n == 0 {
				t.Errorf("%+v", r)
			}
			told += n
		case r.Kind == KindGit:
			findings++
		}
	}
	if told != asked || findings != 2 {
		t.Errorf("%d of %d questions and %d of 2 findings are in the log", told, asked, findings)
	}
}

func TestARecordThatIsTooLongIsCut(t *testing.T) {
	root := t.TempDir()
	l, err := New(root, "alice", func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("<", 15<<10) // six bytes each, as JSON has them
	l.Add(Record{Kind: KindPolicy, Event: "config-refused", Path: long, Text: long, Detail: map[string]string{"value": long}})
	l.Add(Record{Kind: KindPolicy, Event: "config-refused", Path: strings.Repeat("\xff", 5000), Text: "a path without a letter"})
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	got := records(t, Path(root, "alice"))
	if len(got) != 2 || !strings.HasPrefix(got[0].Text, "<<<") || !strings.HasPrefix(got[0].Detail["value"], "<<<") || got[1].Event != "config-refused" {
		t.Errorf("%d records: %.300v", len(got), got)
	}
}
