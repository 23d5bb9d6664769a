package launch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/listeners"
	"agentconnect.md/sandbox/cmd/internal/netns"
	"agentconnect.md/sandbox/cmd/internal/vfork"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/seccomp"
)

// Process is a started program. PID is the process that we started: bubblewrap, or the
// program itself without a boundary.
type Process struct {
	PID  int
	Plan *sandbox.Plan // nil without a boundary
	// Network is where its connections arrive, in a gated network; the caller closes it.
	Network *listeners.Set
	// Inside lets others in for as long as the program runs, where the network is the
	// sandbox's own; nil without one, and with Join.
	Inside *Inside

	boundary bool
	nested   bool // the launcher, then bubblewrap, is the first process of a pid namespace

	reaped chan struct{} // closed when the number is another's, or never was anyone's
	done   chan struct{}
	end    End

	mu     sync.Mutex
	init   int           // the sandbox's first process, 0 until known
	initFD int           // its pidfd, -1 until known
	told   chan struct{} // closed when init is known or never will be

	holding sync.Mutex
	held    *hold // while it is halted
}

// Done is closed when the program has ended and nothing of its sandbox runs any more.
func (p *Process) Done() <-chan struct{} { return p.done }

// End says how the program ended; valid after Done.
func (p *Process) End() End { return p.end }

// once makes one attempt.
func (s *Start) once(ctx context.Context) (*Process, error) {
	var b *begun
	var err error
	switch {
	case s.Ahead != nil:
		b = s.Ahead.take(s)
		s.Ahead = nil // another attempt takes another launcher
	case s.Compile != nil && s.Expect != nil && s.Join == nil:
		if b, err = s.begin(s.Expect, nil); err != nil {
			return nil, err
		}
	}
	if b != nil {
		b.place(ctx, s.Place)
	}
	spec, err := s.spec(ctx)
	if b != nil && (err != nil || !b.of.allows(spec)) {
		b.drop()
		b = nil
	}
	switch {
	case err != nil:
		return nil, err
	case b != nil:
		err = b.tell(spec, s.Private)
	default:
		if b, err = s.begin(nil, spec); err == nil {
			b.place(ctx, s.Place)
		}
	}
	if err != nil {
		return nil, err
	}
	if s.Behind != nil {
		s.Behind()
	}
	return s.goOn(ctx, b, spec)
}

// spec says what is started.
func (s *Start) spec(ctx context.Context) (*wire.Launch, error) {
	spec := &wire.Launch{Version: wire.Version, Argv: s.Argv, Env: s.Env, Dir: s.Dir, PassFD: s.Pass != nil, Ports: s.Ports, Join: s.Join != nil}
	if s.Compile != nil {
		is := make(chan wire.BwrapIs, 1)
		go func() { is <- AskBwrap(ctx, s.Bwrap, s.BwrapIs) }()
		plan, err := s.Compile()
		if err != nil {
			return nil, err
		}
		plan.OldBwrap = (<-is).Old
		filter, err := seccomp.Filter(runtime.GOARCH, seccomp.Options{Nesting: plan.Nesting, Signals: plan.DieWithParent})
		if err != nil {
			return nil, &UnavailableError{Err: err}
		}
		spec.Plan, spec.Bwrap, spec.Seccomp = plan, s.Bwrap, filter
		if err := executable(s.Bwrap); err != nil {
			return nil, &UnavailableError{Err: err}
		}
	}
	switch {
	case len(s.Private) == 0:
	case spec.Plan == nil:
		spec.Env = wire.MergeEnv(s.Env, s.Private)
	default:
		spec.PassEnv = true
		spec.Argv = append([]string{sandbox.GuestPath, "start", strconv.Itoa(wire.EnvFD), "--"}, s.Argv...)
	}
	return spec, nil
}

// goOn has a launcher that knows its plan become the program.
func (s *Start) goOn(ctx context.Context, b *begun, spec *wire.Launch) (*Process, error) {
	p := b.p
	p.Plan = spec.Plan
	// The pipe stays open until the process is gone, read to the end or not: bubblewrap would die of
	// writing to it between its fork and its word to the child, which then waits for ever.
	defer b.close()
	if s.Join != nil {
		stop := context.AfterFunc(ctx, func() { b.gate.SetDeadline(time.Unix(1, 0)) })
		defer stop()
	}
	<-b.started
	if err := b.failed; err != nil {
		var le *wire.LaunchError
		if errors.As(err, &le) || ctx.Err() != nil {
			return nil, errors.Join(ctx.Err(), err)
		}
		if spec.Plan != nil {
			return nil, &UnavailableError{Err: fmt.Errorf("new namespaces: %w", err)}
		}
		return nil, err
	}
	if err := b.passGate(ctx); err != nil {
		close(p.told)
		if killed := p.killed(ctx); killed != nil {
			err = killed
		}
		p.kill()
		<-p.done
		p.closeNetwork()
		return nil, err
	}
	if spec.Plan == nil {
		close(p.told)
		return p, nil
	}
	// bubblewrap tells of its first process before it starts anything: without that word
	// there is no sandbox, whatever program stands in bubblewrap's place.
	stop := context.AfterFunc(ctx, func() { b.infoR.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := p.learnInit(b.infoR); err != nil {
		killed := p.killed(ctx)
		p.kill()
		<-p.done
		p.closeNetwork()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if killed != nil {
			return nil, killed
		}
		return nil, &UnavailableError{Err: fmt.Errorf("%s made no sandbox: %s: %w", s.Bwrap, p.end.Text, err)}
	}
	return p, nil
}

// own starts and reaps the process, all from one thread that lives as long as the
// process: the kernel sends a parent's death signal when the thread that forked ends. What was
// opened for the process alone is closed here.
func (p *Process) own(start *vfork.Start, first *os.File, its []*os.File, started func(error)) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(p.done)
	process, err := start.Run()
	closeAll(its) // so that the process's end is the end of what it says
	if err == nil && first != nil {
		process, err = joined(process, first, p.nested)
	}
	if err == nil {
		p.PID = process.Pid
	} else {
		close(p.reaped)
	}
	started(err)
	if err != nil {
		return
	}
	p.end = endOf(process.Wait())
	close(p.reaped)
	p.endSandbox()
	if p.boundary {
		p.Inside.Close()
	}
}

// joined waits for the launcher's word who goes on, its sibling and our child, and for its
// own end. With nested that one says who goes on in its stead, and ends in turn.
func joined(launcher *vfork.Process, gate *os.File, nested bool) (*vfork.Process, error) {
	line, pid := nextJoined(gate)
	if pid == 0 {
		signalChild(launcher.Pid, syscall.SIGKILL)
	}
	end := endOf(launcher.Wait())
	if pid == 0 {
		if le, derr := wire.DecodeLaunchError(line); derr == nil && len(line) > 0 {
			return nil, le
		}
		return nil, fmt.Errorf("nobody joined the sandbox: %s", end.Text)
	}
	process := vfork.Child(pid)
	if !nested {
		return process, nil
	}
	if _, pid = nextJoined(gate); pid == 0 {
		signalChild(process.Pid, syscall.SIGKILL)
	}
	end = endOf(process.Wait())
	if pid == 0 {
		return nil, fmt.Errorf("nobody joined the sandbox: %s", end.Text)
	}
	return vfork.Child(pid), nil
}

// nextJoined reads one Joined, or another line. What follows it is another's.
func nextJoined(gate *os.File) (line []byte, pid int) {
	var b [1]byte
	var err error
	for err == nil && !bytes.HasSuffix(line, []byte("\n")) && len(line) < 64<<10 {
		var n int
		n, err = gate.Read(b[:])
		line = append(line, b[:n]...)
	}
	return line, wire.ParseJoined(string(line))
}

// endSandbox makes sure that the sandbox's first process is gone, and with it, by the
// kernel, all others: whoever killed bubblewrap's outer process did not end it.
func (p *Process) endSandbox() {
	if !p.boundary {
		return
	}
	<-p.told
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.initFD < 0 {
		return
	}
	_ = unix.PidfdSendSignal(p.initFD, unix.SIGKILL, nil, 0)
	waitEnd(p.initFD)
	// Where it came to us as the nearest subreaper it is ours to reap.
	var ws unix.WaitStatus
	_, _ = unix.Wait4(p.init, &ws, unix.WNOHANG, nil)
	unix.Close(p.initFD)
	p.initFD = -1
}

func endOf(ws syscall.WaitStatus, err error) End {
	if err != nil {
		return End{Code: -1, Text: err.Error()}
	}
	switch {
	case ws.Signaled():
		return End{Code: 128 + int(ws.Signal()), Signal: int(ws.Signal()), Text: fmt.Sprintf("killed by signal %d (%s)", ws.Signal(), ws.Signal())}
	case ws.ExitStatus() > 128 && ws.ExitStatus() <= 128+64:
		// bubblewrap passes its child's signal on in the shell's way.
		sig := syscall.Signal(ws.ExitStatus() - 128)
		return End{Code: ws.ExitStatus(), Signal: int(sig), Text: fmt.Sprintf("killed by signal %d (%s)", sig, sig)}
	}
	return End{Code: ws.ExitStatus(), Text: fmt.Sprintf("exit status %d", ws.ExitStatus())}
}

// killedWait is how long a process that closed its pipes may take to be gone.
const killedWait = 200 * time.Millisecond

// killed reports that somebody else killed the process during its start. That says
// nothing of the host: another start may be well. A process that still runs was not.
func (p *Process) killed(ctx context.Context) error {
	if ctx.Err() != nil {
		return nil
	}
	timer := time.NewTimer(killedWait)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-timer.C:
		return nil
	}
	if sig := syscall.Signal(p.end.Signal); sig == syscall.SIGKILL || sig == syscall.SIGTERM {
		return fmt.Errorf("the start was cut short: the launcher was %s", p.end.Text)
	}
	return nil
}

func (p *Process) gateError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return &UnavailableError{Err: fmt.Errorf("the launcher ended before it was ready: %w", err)}
}

func launchError(word []byte) error {
	le, err := wire.DecodeLaunchError(word)
	if err != nil {
		return fmt.Errorf("the launcher said %q", word)
	}
	return le
}

// ready reads the launcher's first word, with the sockets that come with it: it is ready,
// or an error up to the end.
func (p *Process) ready(gate *os.File) error {
	var word []byte
	var files []*os.File
	defer func() { closeAll(files) }()
	for len(word) < 64<<10 {
		n, more, err := receive(gate, &word)
		files = append(files, more...)
		if err != nil {
			return err
		}
		if kinds, weaker, ok := wire.ParseReady(word); ok {
			kinds, files, p.Inside = inside(kinds, files)
			if kinds == "" && len(files) == 0 {
				return nil
			}
			p.Network, err = listeners.New(kinds, files, weaker)
			files = nil
			return err
		}
		if n == 0 {
			if len(word) == 0 {
				return io.EOF
			}
			return launchError(word)
		}
	}
	return errors.New("a word that does not end")
}

// inside takes the namespaces out of what the launcher passed: they are last.
func inside(kinds string, files []*os.File) (string, []*os.File, *Inside) {
	rest, ok := strings.CutSuffix(kinds, string(netns.UserNamespace)+string(netns.NetNamespace))
	if n := len(files); ok && n == len(kinds) {
		return rest, files[:n-2], &Inside{User: files[n-2], Net: files[n-1]}
	}
	return kinds, files, nil
}

// maxPassed is how many descriptors one message of the kernel's carries (SCM_MAX_FD).
const maxPassed = 253

// Passed takes the descriptors of a control message over. The caller closes them, also when
// there is an error.
func Passed(oob []byte) ([]*os.File, error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue // credentials or something else; not descriptors
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "passed"))
		}
	}
	return files, nil
}

// closeNetwork closes what the launcher of a failed start passed.
func (p *Process) closeNetwork() {
	if p.Network != nil {
		p.Network.Close()
	}
}

// learnInit reads the pid of the sandbox's first process, which bubblewrap tells. An
// error means that it told none.
func (p *Process) learnInit(info *os.File) error {
	defer close(p.told)
	var v struct {
		Child int `json:"child-pid"`
	}
	if err := json.NewDecoder(io.LimitReader(info, 64<<10)).Decode(&v); err != nil {
		return fmt.Errorf("its first process is not known: %w", err)
	}
	if v.Child <= 1 {
		return fmt.Errorf("its first process cannot be %d", v.Child)
	}
	if p.nested {
		// The number is of the namespace between; it is the only child here.
		below := children(p.PID)
		if len(below) != 1 {
			return nil // it has ended already
		}
		v.Child = below[0]
	}
	fd, err := unix.PidfdOpen(v.Child, 0)
	if err != nil {
		return nil // it has ended already
	}
	p.mu.Lock()
	p.init, p.initFD = v.Child, fd
	p.mu.Unlock()
	return nil
}

// Init gives the host's pid of the sandbox's first process once it is known; 0 if it
// never started.
func (p *Process) Init(ctx context.Context) int {
	select {
	case <-p.told:
	case <-p.done:
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.init
}

// setUpWait bounds how long bubblewrap may take from its word about its first process to the program.
const setUpWait = 10 * time.Second

// SetUp waits until bubblewrap has set the sandbox up and forked the program, or ended, and gives
// the sandbox's first process. Before that its namespaces are not what they will be: their
// root is still another one, their user has no name yet.
func (p *Process) SetUp(ctx context.Context) int {
	first := p.Init(ctx)
	for end := time.Now().Add(setUpWait); first > 0 && len(children(first)) == 0 && time.Now().Before(end); {
		select {
		case <-p.done:
			return first
		case <-ctx.Done():
			return first
		case <-time.After(200 * time.Microsecond): // nothing tells that a process has forked
		}
	}
	return first
}

// Signal sends a signal to every process of the program: all in the sandbox but its
// first one, or all descendants without a boundary. It needs no bus and no manager.
func (p *Process) Signal(sig syscall.Signal) {
	p.mu.Lock()
	first := p.init
	p.mu.Unlock()
	if p.Plan == nil {
		for _, pid := range append(descendants(p.PID), p.PID) {
			signalChild(pid, sig)
		}
		return
	}
	for _, pid := range descendants(first) {
		signalChild(pid, sig)
	}
}

// haltWait bounds how long a sandbox's processes may take to stand still.
const haltWait = 2 * time.Second

// Halt stops every process of the sandbox and returns when each of their threads stands
// still: what no control group does where there is none. Resume lets them go on.
func (p *Process) Halt() error {
	p.mu.Lock()
	first := p.init
	p.mu.Unlock()
	if first <= 1 {
		return errors.New("its first process is not known")
	}
	p.holding.Lock()
	defer p.holding.Unlock()
	if p.held != nil {
		return nil
	}
	h := &hold{release: make(chan struct{}), over: make(chan struct{})}
	still := make(chan error, 1)
	go h.keep(first, still)
	if err := <-still; err != nil {
		close(h.release)
		<-h.over
		return err
	}
	p.held = h
	return nil
}

// Resume lets a halted sandbox go on.
func (p *Process) Resume() error {
	p.letGo()
	p.mu.Lock()
	first := p.init
	p.mu.Unlock()
	for _, pid := range append(descendants(first), first) {
		signalChild(pid, syscall.SIGCONT)
	}
	return nil
}

// letGo ends a hold; who was stopped stays so.
func (p *Process) letGo() {
	p.holding.Lock()
	defer p.holding.Unlock()
	h := p.held
	p.held = nil
	if h != nil {
		close(h.release)
		<-h.over
	}
}

// hold keeps a halted sandbox halted. The kernel sends SIGCONT of itself, as when a terminal goes
// whose master lay in a socket that nobody has: it wakes who is stopped, and nobody who is traced.
type hold struct {
	release, over chan struct{}
	threads       []int
}

// keep stops the sandbox of a first process and traces it, both until release; still says when
// none of it runs.
func (h *hold) keep(first int, still chan<- error) {
	// The thread traces, and is to live: what it has started may be bound to end with it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(h.over)
	still <- h.stop(first)
	<-h.release
	for left := h.threads; ; time.Sleep(100 * time.Microsecond) { //nolint:forbidigo // of another's threads nothing else tells without a signal
		// All in turn: a first process that dies waits for the others, and they for us.
		if left = slices.DeleteFunc(left, letGo); len(left) == 0 {
			return
		}
	}
}

// letGo ends the tracing of a thread; false: not yet.
func letGo(tid int) bool {
	if unix.PtraceDetach(tid) == nil {
		return true
	}
	// It has died, or is about to; or it was woken while it was halted in vain.
	var ws unix.WaitStatus
	if got, err := unix.Wait4(tid, &ws, unix.WNOHANG|unix.WALL, nil); errors.Is(err, unix.ECHILD) || got == tid && (ws.Exited() || ws.Signaled()) {
		return true
	}
	_ = unix.PtraceInterrupt(tid)
	return false
}

func (h *hold) stop(first int) error {
	tried := map[int]bool{}
	// A process that still runs can wake one that does not; after two rounds in which none
	// ran there is none left that could.
	for end, quiet := time.Now().Add(haltWait), 0; quiet < 2; {
		quiet++
		for _, pid := range append(descendants(first), first) {
			// Each thread by itself: the kernel tells one of a process's, and that may be one which
			// waits for a child of vfork and tells no other.
			run, stopped := threads(pid)
			for _, tid := range run {
				_ = unix.Tgkill(pid, tid, unix.SIGSTOP)
				quiet = 0
			}
			for _, tid := range stopped {
				if !tried[tid] { // where none may be traced it is stopped all the same
					tried[tid] = true
					if unix.PtraceSeize(tid) == nil {
						h.threads = append(h.threads, tid)
					}
					quiet = 0
				}
			}
		}
		if time.Now().After(end) {
			return fmt.Errorf("the sandbox does not stand still within %v", haltWait)
		}
		runtime.Gosched()
	}
	return nil
}

// threads lists those of a process that may run, and those that a signal has stopped.
func threads(pid int) (run, stopped []int) {
	dir := "/proc/" + strconv.Itoa(pid) + "/task"
	tasks, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil // it is gone
	}
	for _, t := range tasks {
		b, err := os.ReadFile(dir + "/" + t.Name() + "/stat")
		if err != nil {
			continue
		}
		tid, err := strconv.Atoi(t.Name())
		if err != nil {
			continue
		}
		switch state := taskState(b); {
		case state == 'T':
			stopped = append(stopped, tid)
		case state == 't', state == 'Z', state == 'X':
		case state == 'D' && waitsForChild(dir+"/"+t.Name()):
		default:
			run = append(run, tid)
		}
	}
	return run, stopped
}

// taskState is the letter that a thread's stat has for its state; '?' where there is none.
func taskState(stat []byte) byte {
	// "pid (name) state …": a name may hold anything, the last parenthesis ends it.
	if i := bytes.LastIndexByte(stat, ')'); i >= 0 && i+2 < len(stat) {
		return stat[i+2]
	}
	return '?'
}

// waitsForChild reports whether a thread that no signal reaches waits for a child of vfork that
// stands still. An agent can have such a child and sleep for something else: so the thread has
// its SIGSTOP, which it meets before it runs on, and is in the call that made the child.
func waitsForChild(task string) bool {
	b, err := os.ReadFile(task + "/status")
	if err != nil || !stopPending(b) {
		return false
	}
	// Where no process may trace another this cannot be read.
	if b, err := os.ReadFile(task + "/syscall"); err == nil && !isVfork(string(b)) {
		return false
	}
	if b, err = os.ReadFile(task + "/children"); err != nil {
		return false
	}
	for f := range strings.FieldsSeq(string(b)) {
		if child, err := strconv.Atoi(f); err == nil {
			if run, _ := threads(child); len(run) == 0 {
				return true
			}
		}
	}
	return false
}

// stopPending reports whether a SIGSTOP waits for the thread of this status.
func stopPending(status []byte) bool {
	_, rest, _ := bytes.Cut(status, []byte("\nSigPnd:"))
	hex, _, _ := bytes.Cut(rest, []byte{'\n'})
	set, err := strconv.ParseUint(strings.TrimSpace(string(hex)), 16, 64)
	return err == nil && set&(1<<(unix.SIGSTOP-1)) != 0
}

// isVfork reports whether call, as /proc has it, is one that may wait for its child.
func isVfork(call string) bool {
	const vfork = 58 // of amd64; others have none
	words := strings.Fields(call)
	if len(words) < 2 {
		return false
	}
	switch words[0] {
	case strconv.Itoa(unix.SYS_CLONE):
		flags, err := strconv.ParseUint(words[1], 0, 64)
		return err == nil && flags&unix.CLONE_VFORK != 0
	case strconv.Itoa(unix.SYS_CLONE3): // its flags lie behind a pointer
		return true
	}
	return runtime.GOARCH == "amd64" && words[0] == strconv.Itoa(vfork)
}

// kill ends the program at once. The kernel ends a pid namespace with its first process.
func (p *Process) kill() {
	select {
	case <-p.done:
		return
	default:
	}
	if p.Plan == nil {
		for _, pid := range descendants(p.PID) {
			signalChild(pid, syscall.SIGKILL)
		}
	}
	p.mu.Lock()
	known := p.initFD >= 0
	if known {
		_ = unix.PidfdSendSignal(p.initFD, unix.SIGKILL, nil, 0)
	}
	p.mu.Unlock()
	if !known && p.Plan != nil {
		p.killUnknown()
	}
	signalChild(p.PID, syscall.SIGKILL)
	p.letGo() // who is traced is not gone before
}

// killUnknown ends a sandbox whose first process bubblewrap has not told of yet. Its outer
// process is halted first: killed alone, it would leave the first one waiting for it for
// ever, and unhalted it could fork behind our back.
func (p *Process) killUnknown() {
	signalChild(p.PID, syscall.SIGSTOP)
	for range 10_000 {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID) + "/stat")
		if err != nil {
			break // it is gone
		}
		if state := taskState(b); state == 'T' || state == 'Z' || state == 'X' {
			break
		}
		runtime.Gosched()
	}
	for _, pid := range children(p.PID) {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // it is gone
		}
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		waitEnd(fd)
		unix.Close(fd)
	}
}

// waitEnd waits until the process of a pidfd has ended.
func waitEnd(pidfd int) {
	poll := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(poll, -1); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// Stop ends the program: it waits for grace (the caller has closed its stdin), sends
// SIGTERM, waits killGrace, sends SIGKILL. It returns when all is over.
func (p *Process) Stop(ctx context.Context, grace, killGrace time.Duration) {
	p.StopWith(ctx, grace, killGrace, p.Signal)
}

// StopWith is Stop with another way to signal all that belongs to the program.
func (p *Process) StopWith(ctx context.Context, grace, killGrace time.Duration, signal func(syscall.Signal)) {
	for _, step := range []struct {
		wait time.Duration
		then func()
	}{{grace, func() { signal(syscall.SIGTERM) }}, {killGrace, p.kill}} {
		timer := time.NewTimer(max(step.wait, 0))
		select {
		case <-p.done:
			timer.Stop()
			return
		case <-ctx.Done():
			timer.Stop()
		case <-timer.C:
		}
		step.then()
	}
	p.kill()
	<-p.done
}

// Kill ends the program at once and waits for its end.
func (p *Process) Kill() {
	p.kill()
	<-p.done
}

// signalChild signals a process through a descriptor, so that a number used again by
// another process in between is not hit.
func signalChild(pid int, sig syscall.Signal) {
	if pid <= 1 {
		return
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // it is gone
	}
	defer unix.Close(fd)
	// The descriptor is of the process that has the number now; it was ours when listed.
	_ = unix.PidfdSendSignal(fd, sig, nil, 0)
}

// descendants lists the processes below pid, children before grandchildren.
func descendants(pid int) []int {
	if pid <= 0 {
		return nil
	}
	out := children(pid)
	for i := 0; i < len(out); i++ {
		out = append(out, children(out[i])...)
	}
	return out
}

func children(pid int) []int {
	var out []int
	tasks, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
	if err != nil {
		return nil
	}
	for _, t := range tasks {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/task/" + t.Name() + "/children")
		if err != nil {
			continue
		}
		for f := range strings.FieldsSeq(string(b)) {
			if n, err := strconv.Atoi(f); err == nil {
				out = append(out, n)
			}
		}
	}
	return out
}

// AskBwrap asks bubblewrap for its version, unless it is the file that was asked before.
func AskBwrap(ctx context.Context, path string, before wire.BwrapIs) wire.BwrapIs {
	file := ""
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err == nil {
		file = fmt.Sprint(st.Dev, ":", st.Ino, ":", st.Size, ":", st.Mtim.Nano(), ":", st.Ctim.Nano())
	}
	if file != "" && file == before.File {
		return before
	}
	return wire.BwrapIs{File: file, Old: oldBwrap(ctx, path)}
}

// oldBwrap reports whether this bubblewrap is known to lack --disable-userns. One that does
// not tell its version gets the option, and refuses it if it has none.
func oldBwrap(ctx context.Context, path string) bool {
	ctx, cancel := context.WithTimeout(ctx, versionWait)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Env = []string{}
	cmd.WaitDelay = versionWait
	out, err := cmd.Output()
	line, _, _ := strings.Cut(string(out), "\n")
	v, ok := sandbox.ParseBwrapVersion(line)
	return err == nil && ok && !v.DisablesUserns()
}

// versionWait is how long bubblewrap may take to tell its version.
const versionWait = 5 * time.Second

func executable(path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
		return fmt.Errorf("%s is not a program", path)
	}
	return nil
}

// Sealed writes v as JSON into a memfd that nobody can change any more, open at its start.
func Sealed(name string, v any) (*os.File, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return sealBytes(name, b)
}

func sealBytes(name string, b []byte) (*os.File, error) {
	f, err := memfd(name)
	if err != nil {
		return nil, err
	}
	if err := seal(f, b); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// memfd makes an empty file without a name.
func memfd(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate("agentconnect-"+name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// seal writes all that is ever in the file. Who reads it begins at its start.
func seal(f *os.File, b []byte) error {
	_, err := f.Write(b)
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	}
	if err != nil {
		return fmt.Errorf("memfd: %w", err)
	}
	return nil
}
