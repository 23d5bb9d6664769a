// Leases on the host's configuration files. Between the host's rename over a sealed file and
// the next mount over it the agent could write the new one, and the host's next command would
// act on that. So the supervisor holds a lease on the file: whoever opens it, as git does
// before it writes a new one, waits until the agent stands still. Inside, a copy stands in for
// the file, so that nothing there opens the host's own.

package sealguard

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/sandbox/pathfd"
)

// Times of one opened file.
const (
	// openedWait bounds how long the agent stands still while a program of the host has the
	// file open, or git's lock on it exists.
	openedWait = 3 * time.Second
	openedStep = 300 * time.Microsecond
	// idleLock: git has its lock open until it renames it. One that nobody had open for so long is
	// nobody's: the agent makes some, too.
	idleLock = 300 * time.Millisecond
	// staleLock: a lock file older than that belongs to nobody.
	staleLock = 4 * time.Second
	// Leases that could not be had are tried again, ever more rarely.
	firstRetry = 50 * time.Millisecond
	lastRetry  = 10 * time.Second
)

// release gives a lease up; whoever waited goes on.
func (s *seal) release() {
	if s.lease != nil {
		s.lease.Close()
		s.lease = nil
	}
}

// take gets the lease, if nobody has the file open.
func (s *seal) take() bool { return s.lease != nil || s.takeUnless(leasedElsewhere()[s.id]) }

// takeUnless gets a lease that is not held yet, unless another process holds one.
func (s *seal) takeUnless(leased bool) bool {
	// Another agent's guard may hold one: asking for the file would take it away, and that one
	// would ask for it again, in turn for ever.
	if leased {
		return false
	}
	f, err := os.OpenFile("/proc/self/fd/"+strconv.Itoa(s.fd), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		f.Close()
		return false
	}
	s.lease = f
	return true
}

// leasedElsewhere are the files that other processes hold leases on.
func leasedElsewhere() map[inode]bool {
	f, err := os.Open("/proc/locks")
	if err != nil {
		return nil
	}
	defer f.Close()
	return parseLeases(f, os.Getpid())
}

// parseLeases reads lines as proc_locks(5) has them: "1: LEASE ACTIVE WRITE PID MAJ:MIN:INODE 0 EOF",
// with MAJ and MIN in hexadecimal.
func parseLeases(r io.Reader, self int) map[inode]bool {
	held := map[inode]bool{}
	s := bufio.NewScanner(r)
	for s.Scan() {
		f := strings.Fields(s.Text())
		if len(f) < 6 || f[1] != "LEASE" || f[4] == strconv.Itoa(self) {
			continue
		}
		var major, minor uint32
		var ino uint64
		if n, err := fmt.Sscanf(f[5], "%x:%x:%d", &major, &minor, &ino); n == 3 && err == nil {
			held[inode{unix.Mkdev(major, minor), ino}] = true
		}
	}
	return held
}

// openHeld opens what an O_PATH descriptor stands for. Where it is under a lease, whoever holds
// that is asked for it, and gets a while: to wait for ever, with the lock held, for one who
// waits for us would be the end of both.
func openHeld(at int) (*os.File, error) {
	for end := time.Now().Add(openedWait); ; time.Sleep(openedStep) { //nolint:forbidigo // asked with a deadline
		f, err := os.OpenFile("/proc/self/fd/"+strconv.Itoa(at), os.O_RDONLY|unix.O_NONBLOCK, 0)
		if !errors.Is(err, unix.EAGAIN) || time.Now().After(end) {
			return f, err
		}
	}
}

// asked reports whether somebody waits for the file.
func (s *seal) asked() bool {
	if s.lease == nil {
		return false
	}
	held, err := unix.FcntlInt(s.lease.Fd(), unix.F_GETLEASE, 0)
	return err != nil || held != unix.F_WRLCK
}

// lease takes the leases that are not held. The lock is held.
func (g *Guard) lease() {
	missing, locked := false, false
	var busy []*seal                          // by programs of the host
	others := sync.OnceValue(leasedElsewhere) // once for all: the kernel lists every lock each time
	for _, s := range g.seals {
		switch {
		case !s.copied || s.lease != nil:
		case others()[s.id]:
			missing = true
		case !s.takeUnless(false):
			missing = true
			busy = append(busy, s)
		default:
			// A git that read the file before does not ask again.
			if is, _ := g.place.locked(s.path + ".lock"); is {
				s.release()
				missing, locked = true, true
				busy = append(busy, s)
			}
		}
	}
	if len(busy) > 0 && len(g.boxes) > 0 && !g.settling && (g.retry == 0 || locked) {
		g.still(func() { g.settle(busy) })
		missing = slices.ContainsFunc(busy, func(s *seal) bool { return g.seals[s.path] == s && s.lease == nil })
	}
	switch {
	case !missing || len(g.boxes)+g.expected == 0:
		g.retry = 0
	case g.retry == 0:
		g.retry = firstRetry
	default:
		g.retry = min(2*g.retry, lastRetry)
	}
}

// opened lets those go on that wait for a file, while the agent stands still, and takes the
// lease back when they are done. The lock is held.
func (g *Guard) opened() {
	asked := g.asked()
	if len(asked) == 0 {
		return
	}
	g.still(func() {
		g.admit(asked)
		g.settle(asked)
		g.check()
		g.lease()
	})
}

// asked are the files that somebody waits for.
func (g *Guard) asked() (seals []*seal) {
	if g.expected > 0 {
		return nil // who starts cannot be halted yet: they wait
	}
	for _, s := range g.seals {
		if s.asked() {
			seals = append(seals, s)
		}
	}
	return seals
}

// settle waits, while nothing of the agent runs, until the host is done with files, but no longer
// than a while.
func (g *Guard) settle(seals []*seal) {
	if g.settling {
		return // whoever waits already looks again
	}
	g.settling = true
	defer func() { g.settling = false }()
	end := time.Now().Add(openedWait)
	for i := 0; i < len(seals); i++ {
		s := seals[i]
		for s.copied && g.seals[s.path] == s && !g.settled(s) && time.Now().Before(end) {
			// git reads more than one under its lock.
			more := g.asked()
			g.admit(more)
			seals = append(seals, more...)
			time.Sleep(openedStep) //nolint:forbidigo // asked with a deadline; nothing tells that a file is no longer open
		}
	}
}

// admit lets the host go on with files. git makes the lock, which becomes the new file, before
// it opens the old one, and fills it after: what has content by now the agent filled. An empty
// one, or one that comes from now on (git reads the file a few times before it makes one), stays
// out of its reach until the new file is sealed, so that is all the host's work.
func (g *Guard) admit(seals []*seal) {
	for _, s := range seals {
		lock := s.path + ".lock"
		is, empty := g.place.locked(lock)
		_, err := g.place.stat(lock)
		switch {
		case is && empty, errors.Is(err, os.ErrNotExist):
			s.trusted = g.place.is(s.path, s.id) // and not replaced before the agent stood still
		case is:
			if aside, err := g.place.setAside(lock); err == nil {
				g.say(audit.Record{Kind: audit.KindGit, Event: "lock-tampered", Path: lock, Text: "the agent wrote into git's lock on a sealed file: it is set aside as " + audit.Printable(aside) + ", and the host's command fails; run it again"})
			}
		}
		s.release()
	}
}

// locked reports whether a program of the host is changing a file under git's lock.
func (g *Guard) locked(s *seal) bool {
	lock := s.path + ".lock"
	if is, _ := g.place.locked(lock); !is || g.place.written(lock) {
		s.idle = time.Time{}
		return is
	}
	if s.idle.IsZero() {
		s.idle = time.Now()
	}
	return time.Since(s.idle) < idleLock
}

// settled reports whether the host is done with a file: no lock of git's beside it, and the
// lease on what stands there now is ours.
func (g *Guard) settled(s *seal) bool {
	if g.locked(s) {
		return false
	}
	fd, err := pathfd.Absolute(g.place.root, s.path, 0)
	if err != nil {
		return true // what to do about it, check knows
	}
	id, _ := identify(fd)
	unix.Close(fd)
	if id != s.id {
		g.check() // sealed again, which may be waited for anew
		if g.seals[s.path] != s || len(g.boxes) == 0 {
			return true
		}
	}
	if !s.take() {
		return false
	}
	// A git that made its lock since the look above may have read the file and closed it before
	// the lease was ours: it renames without asking again. One that makes it from here on asks.
	if g.locked(s) || !g.place.is(s.path, s.id) {
		s.release()
		return false
	}
	// Written in place: the copy inside follows.
	text, err := readHeld(s.lease)
	if err == nil && text != s.content {
		s.content = text
		if err := g.attach(s, "changed on the host; the agent sees it"); err != nil && !errors.Is(err, unix.ENOENT) { // replaced meanwhile: check sees it
			g.stop(s.path + ": " + err.Error())
			return true
		}
		return false // once more, with a lease
	}
	return true
}

// readHeld reads a file through the descriptor of its lease.
func readHeld(f *os.File) (string, error) {
	st, err := f.Stat()
	if err != nil || st.Size() > maxFile {
		return "", err
	}
	b := make([]byte, st.Size())
	n, err := f.ReadAt(b, 0)
	if n == len(b) {
		err = nil
	}
	return string(b[:n]), err
}

// Change has the host change a sealed file while nothing of the agent runs, and seals what
// stands there then. The seals are looked at before, so that change meets what is the host's.
func (g *Guard) Change(path string, change func() error) error {
	err := errors.New("the agent could not be halted")
	g.mu.Lock()
	defer g.mu.Unlock()
	g.still(func() {
		g.check()
		s := g.seals[path]
		if s == nil || len(g.boxes) == 0 {
			err = errors.New("it is not sealed any more")
			return
		}
		s.release()
		s.trusted = true
		err = change()
		g.check()
		g.lease()
	})
	return err
}
