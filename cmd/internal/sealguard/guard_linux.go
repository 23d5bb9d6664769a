package sealguard

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/gitseal"
	"agentconnect.md/sandbox/sandbox/pathfd"
)

// maxFile bounds a sealed file that is compared or written anew, in bytes.
const maxFile = 4 << 20

// maxUndone bounds how often an agent's renames are undone before it is stopped.
const maxUndone = 50

// maxReplaced bounds how often a file is sealed again at once.
const maxReplaced = 100

// seal is one sealed or pinned path, watched from outside.
type seal struct {
	path string // on the host
	dir  bool
	pin  bool
	fd   int // the sealed inode
	id   inode
	// copied: a copy with this content stands in for the file inside, and lease is ours
	// while the host's own file is under one: whoever opens it waits for us.
	copied  bool
	content string
	lease   *os.File
	// idle is since when nobody had git's lock open.
	idle time.Time
	// attached is which attachment its last one was.
	attached int
	// trusted: what takes the file's place now, while the agent stands still, nobody but the host
	// has written.
	trusted bool
}

type inode struct{ dev, ino uint64 }

// box is one sandbox that sees the seals.
type box struct {
	sandbox Sandbox
	ns      *Namespaces
	mounts  *os.File          // its mountinfo, which can be waited for
	targets map[string]string // host path → path inside, of what is sealed
	knows   map[string]bool   // host paths that are sealed, pinned or missed in it
}

// Guard watches the seals of one agent.
type Guard struct {
	o     Options
	place place

	mu     sync.Mutex
	seals  map[string]*seal
	absent map[string]bool
	way    map[string]bool // folders on the way to absent names that the agent can make or replace
	boxes  map[*box]bool
	// expected counts sandboxes that start, attached the mounts that were attached since the guard began.
	expected, attached int

	dirs   map[string]int // watched folders
	byWd   map[int]string
	inner  inner
	undone int
	// undoings are when names of the agent's were set aside; hostilities how often it did what no
	// tool does.
	undoings    []time.Time
	hostilities int
	retry       time.Duration // when leases are tried again that could not be had; 0 is never
	signal      chan os.Signal
	relay       chan struct{} // closed when no signal is relayed any more
	frozen      bool          // nothing of the agent runs now
	calm        int           // how many starts want all others to stand still
	halted      map[*box]bool // for them
	// settling: the host is being waited for.
	settling bool
	// full: no more folders can be watched, the agent's own watches being the user's, too; all is
	// looked at again at next, which was said once.
	full, saidFull bool
	next           time.Time
	closed         bool

	inotify int
	wake    int // an eventfd
	done    chan struct{}
}

// New makes a guard that watches nothing yet.
func New(o Options) (*Guard, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	g := &Guard{o: o, place: place{root: -1}, inotify: -1, wake: -1, seals: map[string]*seal{}, absent: map[string]bool{}, way: map[string]bool{}, inner: inner{dirs: map[string]gitseal.Role{}, fresh: map[string]gitseal.Role{}}, boxes: map[*box]bool{}, halted: map[*box]bool{}, dirs: map[string]int{}, byWd: map[int]string{}, done: make(chan struct{}), signal: make(chan os.Signal, 1)}
	var err error
	if g.place.root, err = pathfd.Open("/"); err == nil {
		if g.inotify, err = unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK); err == nil {
			g.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		}
	}
	if err != nil {
		g.closeFDs()
		if errors.Is(err, unix.EMFILE) {
			err = fmt.Errorf("%w: each running agent takes one inotify instance, and this user has no more; raise fs.inotify.max_user_instances with sysctl", err)
		}
		return nil, fmt.Errorf("watch of the git seals: %w", err)
	}
	// The kernel says so when somebody opens a file that is under a lease of ours.
	signal.Notify(g.signal, unix.SIGIO)
	g.relay = make(chan struct{})
	go func() {
		defer close(g.relay)
		for range g.signal {
			g.rouse()
		}
	}()
	go g.run()
	return g, nil
}

func (g *Guard) closeFDs() {
	for _, fd := range []int{g.place.root, g.inotify, g.wake} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// Close ends the watch.
func (g *Guard) Close() {
	if g == nil {
		return
	}
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.rouse()
	<-g.done
	signal.Stop(g.signal)
	close(g.signal)
	<-g.relay
	g.mu.Lock()
	defer g.mu.Unlock()
	for b := range g.boxes {
		g.drop(b)
	}
	for _, s := range g.seals {
		s.release()
		unix.Close(s.fd)
	}
	clear(g.seals)
	g.closeFDs()
}

func (g *Guard) rouse() {
	_, _ = unix.Write(g.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
}

// Expected is a sandbox that is about to start.
type Expected struct {
	g    *Guard
	b    *box
	seen int // attachments until then
}

// Expect begins to watch the seals of a plan, and new names, before anything that is started with
// it runs: until the sandbox is known, whoever of the host opens a sealed file waits. Started or
// Failed must follow; nil is a sandbox without seals.
func (g *Guard) Expect(plan *sandbox.Plan, absent []string) *Expected {
	b := &box{targets: map[string]string{}, knows: map[string]bool{}}
	g.mu.Lock()
	defer g.mu.Unlock()
	// What a sandbox that runs already was started without it may change, having made it perhaps:
	// that is reviewed at the end, and not held against it.
	common := func(path string) bool {
		for o := range g.boxes {
			if !o.knows[path] {
				return false
			}
		}
		return true
	}
	for i := range plan.Mounts {
		m := &plan.Mounts[i]
		if !m.Sealed {
			continue
		}
		path := m.Source
		if m.Op == sandbox.OpCover || !m.Pinned && m.Source != m.Target {
			path = hostPath(plan, m)
		}
		if path == "" {
			continue
		}
		if !m.Pinned {
			b.targets[path] = m.Target
		}
		b.knows[path] = true
		if g.seals[path] == nil && common(path) {
			g.hold(path, m)
		}
	}
	for _, p := range absent {
		b.knows[p] = true
		if common(p) {
			g.await(p)
		}
	}
	g.expected++
	g.lease()
	return &Expected{g: g, b: b, seen: g.attached}
}

// Failed says that nothing was started.
func (e *Expected) Failed() {
	if e == nil {
		return
	}
	e.g.mu.Lock()
	e.g.expected--
	e.g.mu.Unlock()
	e.g.rouse()
}

// Started says which sandbox it is. The function that it returns ends the watch. An error means
// that the sandbox is not as it was planned.
func (e *Expected) Started(sb Sandbox) (remove func(), err error) {
	first := sb.Init()
	ns, err := NamespacesOf(first)
	if err != nil {
		e.Failed()
		return nil, err
	}
	g, b := e.g, e.b
	b.sandbox, b.ns = sb, ns
	if b.mounts, err = os.Open("/proc/" + strconv.Itoa(first) + "/mountinfo"); err != nil {
		ns.Close()
		e.Failed()
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.expected--
	g.boxes[b] = true
	g.rouse()
	g.check()
	g.lease()
	if g.attached > e.seen && g.boxes[b] {
		g.still(func() { g.catchUp(e) })
	}
	return func() {
		g.mu.Lock()
		g.drop(b)
		g.mu.Unlock()
		g.rouse()
	}, nil
}

// catchUp attaches in a new sandbox what was sealed anew while it started.
func (g *Guard) catchUp(e *Expected) {
	for _, s := range g.seals {
		if s.attached <= e.seen {
			continue
		}
		err := g.attachIn(e.b, s)
		switch {
		case errors.Is(err, unix.ENOENT): // replaced meanwhile
			s.id = inode{}
		case err != nil:
			g.stop(fmt.Sprintf("%s was changed outside during a start, and could not be sealed there: %v", s.path, err))
			return
		}
	}
	g.check()
}

// hostPath says where on the host the mount point of a sealed mount lies.
func hostPath(plan *sandbox.Plan, m *sandbox.Mount) string {
	for i := len(plan.Mounts) - 1; i >= 0; i-- {
		a := &plan.Mounts[i]
		if a.Op == sandbox.OpBind && !a.Sealed && a.Kind == sandbox.KindDir && strings.HasPrefix(m.Target, a.Target+"/") {
			return filepath.Join(a.Source, strings.TrimPrefix(m.Target, a.Target))
		}
	}
	return ""
}

// drop forgets a sandbox. The lock is held.
func (g *Guard) drop(b *box) {
	if g.boxes[b] {
		delete(g.boxes, b)
		b.ns.Close()
		b.mounts.Close()
	}
}

// hold begins to watch one path. The lock is held.
func (g *Guard) hold(path string, m *sandbox.Mount) {
	fd, err := pathfd.Absolute(g.place.root, path, 0)
	if err != nil {
		g.absent[path] = true // gone since the plan was made
		g.look(filepath.Dir(path))
		return
	}
	s := &seal{path: path, dir: m.Kind == sandbox.KindDir, pin: m.Pinned, fd: fd}
	var mode uint32
	s.id, mode = identify(fd)
	if m.Op == sandbox.OpCover && mode == unix.S_IFREG {
		s.copied, s.content = true, m.Content
	}
	g.seals[path] = s
	g.look(filepath.Dir(path))
}

func identify(fd int) (inode, uint32) {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return inode{}, 0
	}
	return inode{st.Dev, st.Ino}, st.Mode & unix.S_IFMT
}

// await watches for a name that must not come. The lock is held.
func (g *Guard) await(path string) {
	g.absent[path] = true
	g.look(filepath.Dir(path))
	for dir := filepath.Dir(path); g.seals[dir] == nil && slices.ContainsFunc(g.o.Roots, func(r string) bool { return strings.HasPrefix(dir, r+"/") }); {
		g.way[dir] = true
		dir = filepath.Dir(dir)
		g.look(dir)
	}
}

// approach looks for the folders on the way to absent names below dir, which came or is another one
// now. From the top down: what comes into one meanwhile is heard of. The lock is held.
func (g *Guard) approach(dir string) {
	var ways []string
	for w := range g.way {
		if w == dir || strings.HasPrefix(w, dir+"/") {
			ways = append(ways, w)
		}
	}
	slices.Sort(ways)
	for _, w := range ways {
		g.lookAgain(w)
	}
}

// came says what must go for an absent name to be none again; empty if nothing must.
func (g *Guard) came(path string) string {
	if g.seals[path] != nil {
		return "" // it stands there sealed
	}
	st, err := g.place.stat(path)
	switch {
	case err == nil && filepath.Base(path) == gitseal.ConflictsFile && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size == 0 && g.place.remove(path) == nil:
		return "" // git writes one with each commit: it says nothing, until it is written into
	case err == nil:
		return path
	case errors.Is(err, unix.EACCES) && g.shut(path):
		return path // or it may have
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR):
		for dir := filepath.Dir(path); dir != "/"; dir = filepath.Dir(dir) {
			if st, err := g.place.stat(dir); err == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK {
				return dir // where it leads the name can come unseen
			}
		}
	}
	return ""
}

// look watches a folder for names that come and go. The lock is held.
func (g *Guard) look(dir string) {
	if _, ok := g.dirs[dir]; ok {
		return
	}
	wd, err := unix.InotifyAddWatch(g.inotify, dir, unix.IN_CREATE|unix.IN_MOVE|unix.IN_DELETE|unix.IN_MOVE_SELF|unix.IN_DELETE_SELF|unix.IN_ONLYDIR|unix.IN_DONT_FOLLOW)
	if err != nil {
		if errors.Is(err, unix.ENOSPC) {
			g.full = true
			if !g.saidFull {
				g.saidFull = true
				g.say(audit.Record{Kind: audit.KindGit, Event: "watch-limit", Path: dir, Text: "no more folders can be watched (fs.inotify.max_user_watches; the agent may have taken them): all are looked at again and again instead"})
			}
		}
		return
	}
	// The kernel gives the same number for a folder that was moved here.
	if before, ok := g.byWd[wd]; ok && before != dir && g.dirs[before] == wd {
		delete(g.dirs, before)
		delete(g.inner.dirs, before)
	}
	g.dirs[dir], g.byWd[wd] = wd, dir
}

func (g *Guard) say(r audit.Record) {
	g.o.Audit.Add(r)
	g.o.Log.Warn(r.Text, "path", audit.Printable(r.Path))
}

// run waits for events. At rest it does not wake up.
func (g *Guard) run() {
	defer close(g.done)
	buf := make([]byte, 64<<10)
	for {
		g.mu.Lock()
		if g.closed {
			g.mu.Unlock()
			return
		}
		fds := []unix.PollFd{{Fd: int32(g.wake), Events: unix.POLLIN}, {Fd: int32(g.inotify), Events: unix.POLLIN}}
		for b := range g.boxes {
			fds = append(fds, unix.PollFd{Fd: int32(b.mounts.Fd()), Events: unix.POLLPRI})
		}
		wait := -1
		if g.retry > 0 {
			wait = int(g.retry.Milliseconds())
		}
		if left := int(max(time.Until(g.next), 0).Milliseconds()) + 1; g.full && len(g.boxes) > 0 && (wait < 0 || left < wait) {
			wait = left
		}
		g.mu.Unlock()
		n, err := unix.Poll(fds, wait)
		if err != nil && err != unix.EINTR {
			return
		}
		g.mu.Lock()
		if g.closed {
			g.mu.Unlock()
			return
		}
		if fds[0].Revents != 0 {
			_, _ = unix.Read(g.wake, buf[:8])
		}
		dirty := false
		for _, f := range fds[2:] {
			dirty = dirty || f.Revents&(unix.POLLPRI|unix.POLLERR) != 0
		}
		if n == 0 {
			g.lease()
			dirty = true
		}
		g.opened()
		if dirty {
			g.check()
		}
		if fds[1].Revents != 0 {
			if g.events(buf) {
				g.check()
			}
			if len(g.inner.fresh) > 0 || g.inner.all {
				g.checkInner()
			}
		}
		if g.full && len(g.boxes) > 0 && !time.Now().Before(g.next) {
			g.lookAtAll()
		}
		g.mu.Unlock()
	}
}

// lookAtAll does without watches, and takes those that there are again. The lock is held.
func (g *Guard) lookAtAll() {
	began := time.Now()
	g.full = false
	for p := range g.seals {
		g.look(filepath.Dir(p))
	}
	for p := range g.absent {
		g.await(p)
	}
	g.check()
	clear(g.inner.dirs) // of those that went nobody was told
	g.inner.all = true
	g.checkInner()
	g.next = time.Now().Add(max(firstRetry, 20*time.Since(began)))
}

// events reads what inotify has, and reports whether any of it concerns a seal. A flood is
// read and looked at name by name; what the kernel dropped counts as everything.
func (g *Guard) events(buf []byte) (concerns bool) {
	n, err := unix.Read(g.inotify, buf)
	if err != nil || n <= 0 {
		return false
	}
	return parseEvents(buf[:n], func(wd int, mask uint32, name string) bool {
		dir, known := g.byWd[wd]
		switch {
		case mask&unix.IN_Q_OVERFLOW != 0:
			g.inner.all = true
			return true
		case mask&(unix.IN_MOVE_SELF|unix.IN_DELETE_SELF) != 0:
			return true
		case mask&unix.IN_IGNORED != 0:
			delete(g.byWd, wd)
			if g.dirs[dir] == wd {
				delete(g.dirs, dir)
				delete(g.inner.dirs, dir)
			}
			return true
		case !known:
			return false
		}
		g.inner.came(dir, name, mask)
		path := dir + "/" + name
		if g.way[path] {
			g.approach(path)
			return true
		}
		return g.seals[path] != nil || g.absent[path]
	})
}

// check compares every seal with what stands at its path, and puts right what is wrong. The
// lock is held.
func (g *Guard) check() {
	var lost []*seal
	for _, s := range g.seals {
		if fd, err := pathfd.Absolute(g.place.root, s.path, 0); err != nil {
			lost = append(lost, s)
		} else {
			if id, _ := identify(fd); id != s.id {
				lost = append(lost, s)
			}
			unix.Close(fd)
		}
	}
	var came []string
	for p := range g.absent {
		if at := g.came(p); at != "" && !slices.Contains(came, at) {
			came = append(came, at)
		}
	}
	if len(lost)+len(came) == 0 {
		return
	}
	// From the root down: what lies in a folder that was moved away comes back with it.
	slices.SortFunc(lost, func(a, b *seal) int { return strings.Compare(a.path, b.path) })
	g.still(func() {
		for _, s := range lost {
			// The host may replace it once more while it is sealed: what was to be mounted over is
			// gone then.
			err := g.restore(s)
			for n := 0; n < maxReplaced && errors.Is(err, unix.ENOENT) && g.seals[s.path] == s; n++ {
				err = g.restore(s)
			}
			if err != nil {
				g.stop(fmt.Sprintf("%s was changed outside or moved, and could not be sealed again: %v", s.path, err))
				return
			}
		}
		var undone, obeyed []string
		for _, p := range came {
			if s := g.adopt(p); s != nil {
				lost = append(lost, s)
				continue
			}
			undone = append(undone, p)
			// Claude Code's own sandbox makes folders to mount on, for each session.
			if !g.place.removeEmpty(p) {
				g.setAside(p)
				obeyed = append(obeyed, p)
			}
		}
		if len(undone) > 0 {
			g.persists(undone, obeyed)
		}
		g.settle(lost)
		g.lease()
	})
}

// shut reports whether a folder above a path is one that the user may not enter though it is
// the user's: an agent can open it again when nobody looks.
func (g *Guard) shut(path string) bool {
	for dir := filepath.Dir(path); dir != "/"; dir = filepath.Dir(dir) {
		if st, err := g.place.stat(dir); err == nil {
			return int(st.Uid) == os.Geteuid()
		}
	}
	return false
}

// still does something while nothing of the agent runs.
func (g *Guard) still(do func()) {
	if g.frozen {
		do()
		return
	}
	g.frozen = true
	defer func() { g.frozen = false }()
	var frozen []*box
	for b := range g.boxes {
		if g.halted[b] {
			continue
		}
		if err := b.sandbox.Freeze(); err != nil {
			g.stop(fmt.Sprintf("a git seal was lost and the agent could not be halted (%v)", err))
			return
		}
		frozen = append(frozen, b)
	}
	do()
	for _, s := range g.seals {
		s.trusted = false
	}
	for _, b := range frozen {
		if !g.boxes[b] {
			continue // stopped
		}
		if err := b.sandbox.Thaw(); err != nil {
			g.stop(fmt.Sprintf("the agent was halted for a git seal and does not go on (%v)", err))
		}
	}
}

// Calm has everything of the agent stand still until resume is called. What cannot be halted
// goes on. The guard goes on, too: whoever reads a file under a lease waits for it.
func (g *Guard) Calm() (resume func()) {
	if g == nil {
		return func() {}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calm++
	for b := range g.boxes {
		if g.halted[b] {
			continue
		}
		if err := b.sandbox.Freeze(); err != nil {
			g.o.Log.Warn("the agent cannot be halted for a start beside it", "error", err)
		}
		g.halted[b] = true // also what was halted in part
	}
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.calm--; g.calm > 0 {
			return
		}
		for b := range g.halted {
			if err := b.sandbox.Thaw(); err != nil && g.boxes[b] {
				g.stop(fmt.Sprintf("the agent was halted for a start beside it and does not go on (%v)", err))
			}
		}
		clear(g.halted)
	}
}

// stop ends the agent. The lock is held.
func (g *Guard) stop(why string) {
	g.say(audit.Record{Kind: audit.KindGit, Event: "stopped", Text: "the agent is stopped: " + why})
	for b := range g.boxes {
		b.sandbox.Kill()
		g.drop(b)
	}
	if g.o.Stop != nil {
		g.o.Stop(why)
	}
}

// restore puts one seal right while everything of the agent stands still.
func (g *Guard) restore(s *seal) error {
	here, err := pathfd.Absolute(g.place.root, s.path, 0)
	if err == nil {
		id, _ := identify(here)
		unix.Close(here)
		if id == s.id {
			return nil // it came back with its folder
		}
	}
	was, rerr := pathfd.Real(s.fd)
	var st unix.Stat_t
	if rerr == nil && unix.Fstat(s.fd, &st) == nil && st.Nlink > 0 && !strings.HasSuffix(was, " (deleted)") && was != s.path {
		switch {
		case g.o.Nesting:
			return g.moveBack(s, was)
		case s.pin:
			// The agent is in it still, and what it makes there nobody would see.
			return fmt.Errorf("the host moved it to %s; what lies there is sealed at the next start", was)
		}
	}
	if _, perr := g.place.stat(filepath.Dir(s.path)); err != nil && errors.Is(perr, os.ErrNotExist) {
		g.forget(s) // it went with its folder, which the host moved or removed
		return nil  // there is nothing left to seal
	}
	switch {
	case errors.Is(err, unix.EACCES):
		return err // there as ever, behind a folder that was shut: it may be opened again
	case err != nil && s.dir && !s.pin:
		// An empty one takes its place: a new name cannot be forbidden, a folder can be sealed.
		if err := g.place.mkdir(s.path, 0o755); err != nil {
			return err
		}
		return g.attach(s, "removed on the host; an empty one is sealed in its place")
	case err != nil:
		g.forget(s)
		if !s.pin {
			g.absent[s.path] = true
		}
		g.say(audit.Record{Kind: audit.KindGit, Event: "seal-gone", Path: s.path, Text: "removed on the host: it must not come back while the agent runs"})
		return nil
	case s.pin:
		return errors.New("another folder stands in its place")
	case s.dir:
		return g.restoreDir(s)
	}
	return g.restoreFile(s)
}

func (g *Guard) forget(s *seal) {
	s.release()
	unix.Close(s.fd)
	delete(g.seals, s.path)
	for p := range g.absent {
		if s.pin && strings.HasPrefix(p, s.path+"/") {
			g.await(p) // which lay in a folder that could not be replaced
		}
	}
}

// moveBack undoes a rename that only a namespace inside the sandbox made possible.
func (g *Guard) moveBack(s *seal, was string) error {
	if g.undone++; g.undone > maxUndone {
		return fmt.Errorf("it was moved %d times", g.undone)
	}
	if !slices.ContainsFunc(g.o.Roots, func(r string) bool { return strings.HasPrefix(was, r+"/") }) {
		return fmt.Errorf("it was moved to %s", was)
	}
	err := g.place.rename(was, s.path, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.ENOENT) {
		err = g.place.rename(was, s.path, unix.RENAME_NOREPLACE)
	}
	if err != nil {
		return err
	}
	fd, err := pathfd.Absolute(g.place.root, s.path, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if id, _ := identify(fd); id != s.id {
		return errElsewhere
	}
	g.say(audit.Record{Kind: audit.KindGit, Event: "seal-moved", Path: s.path, Text: "the agent moved a sealed path away; it is back, and what stood in its place is at " + audit.Printable(was), Detail: map[string]string{"movedTo": audit.Printable(was)}})
	return nil
}

// restoreDir seals a folder that the host put in place of a sealed one, if it holds the same.
func (g *Guard) restoreDir(s *seal) error {
	fd, err := pathfd.Absolute(g.place.root, s.path, unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	old, err := digest(s.fd)
	if err != nil {
		return err
	}
	now, err := digest(fd)
	if err != nil {
		return err
	}
	if len(now) > 0 && !slices.Equal(old, now) {
		return errors.New("another folder stands in its place, and who filled it cannot be told")
	}
	return g.attach(s, "replaced on the host by a folder with the same content; it is sealed again")
}

// digest lists a folder's files with their content, cut.
func digest(dir int) ([]string, error) {
	name := "/proc/self/fd/" + strconv.Itoa(dir)
	entries, err := os.ReadDir(name)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		text, _ := readRegular(name+"/"+e.Name(), maxFile)
		names := uint64(1) // with another one the agent could write it later
		if st, err := e.Info(); err == nil && st.Mode().IsRegular() {
			if sys, ok := st.Sys().(*syscall.Stat_t); ok {
				names = uint64(sys.Nlink) //nolint:unconvert // narrower on some architectures
			}
		}
		out = append(out, fmt.Sprint(e.Name(), "\x00", e.Type(), "\x00", names, "\x00", text))
	}
	return out, nil
}

// restoreFile seals the file that stands in place of a sealed one. What the host's git wrote
// stays as long as it gives git nothing more to run; else the old content comes back.
func (g *Guard) restoreFile(s *seal) error {
	s.release()
	old := s.content
	if !s.copied {
		var err error
		if old, err = readRegular("/proc/self/fd/"+strconv.Itoa(s.fd), maxFile); err != nil {
			return fmt.Errorf("its content before: %w", err)
		}
	}
	now, err := g.place.read(s.path, maxFile)
	if err == nil && (s.trusted || g.same(s.path, old, now)) {
		if err := g.fresh(s.path, now); err != nil {
			return err
		}
		s.content = now
		return g.attach(s, "rewritten on the host; it is sealed again")
	}
	aside, aerr := g.place.setAside(s.path)
	if aerr != nil {
		return aerr
	}
	if err := g.place.write(s.path, old, modeOf(s.fd)); err != nil {
		return err
	}
	detail := map[string]string{"setAside": audit.Printable(aside)}
	if keys, err := gitseal.ExecutableKeys(now); err == nil && len(keys) > 0 {
		detail["executable"] = strings.Join(keys[:min(len(keys), 20)], "\n")
	}
	if err := g.attach(s, ""); err != nil {
		return err
	}
	g.say(audit.Record{Kind: audit.KindGit, Event: "seal-tampered", Path: s.path, Detail: detail,
		Text: "changed while it was not sealed, in what git runs: the content before is back, the other is at " + audit.Printable(aside) + "; if the change was yours, make it again while the agent is stopped"})
	return nil
}

// same reports whether new content gives git on the host nothing else to run or to read.
func (g *Guard) same(path, old, now string) bool {
	if old == now {
		return true
	}
	if s := g.seals[path]; s == nil || !s.copied {
		return false
	}
	a, err1 := gitseal.ExecutableKeys(old)
	b, err2 := gitseal.ExecutableKeys(now)
	return err1 == nil && err2 == nil && slices.Equal(a, b)
}

// fresh gives a file another inode if somebody may hold it open for writing.
func (g *Guard) fresh(path, content string) error {
	f, err := g.place.open(path, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); !ok || sys.Nlink > 1 {
		return g.place.write(path, content, st.Mode().Perm()) // the agent has a name of its own for it
	}
	// A read lease is granted only where nobody has the file open for writing.
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK); err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
		return err
	}
	return g.place.write(path, content, st.Mode().Perm())
}

// attach makes what stands at the path of s the sealed inode, in every sandbox.
func (g *Guard) attach(s *seal, said string) error {
	fd, err := pathfd.Absolute(g.place.root, s.path, 0)
	if err != nil {
		return err
	}
	id, mode := identify(fd)
	if (mode == unix.S_IFDIR) != s.dir {
		unix.Close(fd)
		return errElsewhere
	}
	s.release()
	unix.Close(s.fd)
	s.fd, s.id = fd, id
	if s.copied && filepath.Base(s.path) == "config" && gitseal.Remembers(s.content) {
		delete(g.absent, filepath.Join(filepath.Dir(s.path), gitseal.Resolutions)) // git makes it from now on
	}
	g.attached++
	s.attached = g.attached
	for b := range g.boxes {
		if err := g.attachIn(b, s); err != nil {
			s.id = inode{} // sealed is nothing now
			return err
		}
	}
	if said != "" {
		g.say(audit.Record{Kind: audit.KindGit, Event: "seal-restored", Path: s.path, Text: said})
	}
	return nil
}

// attachIn mounts what stands at the path of s in one sandbox.
func (g *Guard) attachIn(b *box, s *seal) error {
	target, ok := b.targets[s.path]
	if !ok {
		return nil
	}
	var copied *string
	if s.copied {
		copied = &s.content
	}
	if err := b.ns.Attach(target, s.id.dev, s.id.ino, copied); err != nil && !b.sandbox.Ended() {
		return err
	}
	return nil
}

// adopt seals a file that came where `git sparse-checkout` makes one, if it says no more than that
// does: it may be the host's.
func (g *Guard) adopt(path string) *seal {
	if filepath.Base(path) != "config.worktree" {
		return nil
	}
	text, err := g.place.read(path, maxFile)
	if err != nil || !gitseal.OnlySparse(text) || g.fresh(path, text) != nil {
		return nil
	}
	for b := range g.boxes {
		if b.beside(path); b.targets[path] == "" {
			return nil
		}
	}
	s := &seal{path: path, fd: -1, copied: true, content: text}
	g.seals[path] = s
	delete(g.absent, path)
	if err := g.attach(s, "made on the host, to check out some of the files; it is sealed"); err != nil {
		g.forget(s)
		g.absent[path] = true
		return nil
	}
	return s
}

// beside finds out where the sandbox sees a path, by what is sealed in the same folder.
func (b *box) beside(path string) {
	for p, target := range b.targets {
		if filepath.Dir(p) == filepath.Dir(path) && filepath.Base(p) == filepath.Base(target) {
			b.targets[path] = filepath.Join(filepath.Dir(target), filepath.Base(path))
			b.knows[path] = true
			return
		}
	}
}

// setAside moves what must not be there to a name that git does not obey.
func (g *Guard) setAside(path string) {
	text, _ := g.place.read(path, 4<<10)
	aside, err := g.place.setAside(path)
	if err != nil {
		if !errors.Is(err, os.ErrNotExist) {
			g.stop(fmt.Sprintf("%s appeared, which git on the host would obey, and cannot be moved aside: %v", path, err))
		}
		return
	}
	said := "appeared while the agent ran, and git on the host would obey it"
	if filepath.Base(path) == gitseal.ConflictsFile {
		said = "while an agent runs git remembers no resolutions of conflicts, since `git commit` on the host would copy whatever file this names"
	}
	g.say(audit.Record{Kind: audit.KindGit, Event: "new-control-file", Path: path, Detail: map[string]string{"setAside": audit.Printable(aside), "content": strings.ToValidUTF8(text, "�")},
		Text: said + ": it is set aside as " + audit.Printable(aside)})
}

func modeOf(fd int) os.FileMode {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return 0o600
	}
	return os.FileMode(st.Mode & 0o777)
}

func readRegular(path string, most int) (string, error) {
	at, err := pathfd.Open(path)
	if err != nil {
		return "", err
	}
	return readAt(at, path, most)
}

// readAt reads what an O_PATH descriptor stands for, and closes it. A regular file alone is
// opened: anything else might wait, or do something.
func readAt(at int, path string, most int) (string, error) {
	defer unix.Close(at)
	if mode, err := pathfd.Mode(at); err != nil || mode != unix.S_IFREG {
		return "", fmt.Errorf("%s: not a regular file", path)
	}
	f, err := openHeld(at)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !st.Mode().IsRegular() {
		return "", fmt.Errorf("%s: not a regular file", path)
	}
	b, err := io.ReadAll(io.LimitReader(f, int64(most)+1))
	if len(b) > most {
		return "", fmt.Errorf("%s: larger than %d bytes", path, most)
	}
	return string(b), err
}
