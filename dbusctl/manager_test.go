//go:build linux

package dbusctl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/units"
)

// TestMain is also the programs that the tests have systemd run.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "as" {
		code := 0
		if err := programs[os.Args[2]](os.Args[3:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
			var own exitCode
			if errors.As(err, &own) {
				code = int(own)
			}
		}
		// Not os.Exit: under the race detector it takes a second.
		syscall.Exit(code)
	}
	os.Exit(m.Run())
}

type exitCode int

func (c exitCode) Error() string { return fmt.Sprintf("exit status %d", int(c)) }

var programs = map[string]func(args []string) error{
	// ready until it is told to end.
	"ready": func([]string) error {
		stop := make(chan os.Signal, 1)
		signal.Notify(stop, syscall.SIGTERM)
		if err := notify("READY=1\nSTATUS=all well", nil); err != nil {
			return err
		}
		<-stop
		return nil
	},
	// exit with a code, having said why.
	"exit": func(args []string) error {
		code, err := strconv.Atoi(args[0])
		if err != nil {
			return err
		}
		notify("STATUS=as told", nil)
		return exitCode(code)
	},
	// never is ready.
	"never": func([]string) error {
		stop := make(chan os.Signal, 1)
		signal.Notify(stop, syscall.SIGTERM)
		<-stop
		return nil
	},
	// scope starts a process, makes the agent's scope around it, and only then is ready. It ends
	// the process itself, and says so in a file.
	"scope": func(args []string) error {
		stop := make(chan os.Signal, 1)
		signal.Notify(stop, syscall.SIGTERM)
		ctx := context.Background()
		conn, err := Connect(ctx, Here(os.Getenv("XDG_RUNTIME_DIR"), ""), nil)
		if err != nil {
			return err
		}
		defer conn.Close()
		child := exec.Command("sleep", "1000")
		if err := child.Start(); err != nil {
			return err
		}
		a := units.Agent{ID: args[0]}
		scope := a.Scope(conn.Version(), units.Process{PID: uint32(child.Process.Pid), FD: -1})
		err = conn.StartTransient(ctx, scope, Fail)
		if errors.Is(err, ErrUnitExists) {
			// The last one's end is not always noticed by now.
			if err = conn.Discard(ctx, scope.Name); err == nil {
				err = conn.StartTransient(ctx, scope, Fail)
			}
		}
		if err != nil {
			child.Process.Kill()
			return err
		}
		if err := notify("READY=1\nSTATUS=in scope", nil); err != nil {
			return err
		}
		<-stop
		child.Process.Signal(syscall.SIGTERM)
		state := child.Wait()
		return os.WriteFile(args[1], []byte(fmt.Sprint(state)), 0o600)
	},
	// store keeps a descriptor with the manager and says how often it was handed back.
	"store": func([]string) error {
		again := make(chan os.Signal, 1)
		stop := make(chan os.Signal, 1)
		signal.Notify(again, syscall.SIGUSR1)
		signal.Notify(stop, syscall.SIGTERM)
		if os.Getenv("LISTEN_FDS") != "" {
			text := make([]byte, 64)
			n, _ := syscall.Pread(3, text, 0)
			if err := notify("READY=1\nSTATUS=handed "+os.Getenv("LISTEN_FDNAMES")+" "+string(text[:n]), nil); err != nil {
				return err
			}
		} else {
			fd, err := unix.MemfdCreate("spec", unix.MFD_CLOEXEC)
			if err != nil {
				return err
			}
			if _, err := unix.Write(fd, []byte("sealed")); err != nil {
				return err
			}
			if err := notify("FDSTORE=1\nFDNAME=spec", unix.UnixRights(fd)); err != nil {
				return err
			}
			if err := notify("READY=1\nSTATUS=stored", nil); err != nil {
				return err
			}
		}
		select {
		case <-again:
			return exitCode(1)
		case <-stop:
			return nil
		}
	},
}

func notify(state string, rights []byte) error {
	address := os.Getenv("NOTIFY_SOCKET")
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: address, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	if err := raw.Write(func(fd uintptr) bool {
		sendErr = unix.Sendmsg(int(fd), []byte(state), rights, nil, 0)
		return sendErr != unix.EAGAIN
	}); err != nil {
		return err
	}
	return sendErr
}

// needManager is a connection to a real manager; the tests here make and break units of it and
// kill its bus, so they run in the test machine alone.
func needManager(t *testing.T) *Conn {
	t.Helper()
	if os.Getenv("AGENTCONNECT_TEST_MACHINE") == "" || os.Geteuid() == 0 {
		t.Skip("missing: the test machine: make test-systemd")
	}
	c, err := Connect(t.Context(), Here(os.Getenv("XDG_RUNTIME_DIR"), "tester"), slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	since := time.Now()
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		out, _ := exec.Command("journalctl", "--user", "--no-pager", "-q", "-o", "short-monotonic", fmt.Sprintf("--since=@%d.%06d", since.Unix(), since.Nanosecond()/1000)).CombinedOutput()
		t.Logf("the journal of this test:\n%s", out)
	})
	return c
}

// within is a context for what ends by itself. It is longer than the 90 s for which a user
// manager does nothing whose bus was killed in the middle of a change (systemd 252 and 257).
func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// agent is an agent whose supervisor is one of the programs above, and gone after the test.
func agent(t *testing.T, c *Conn, id string, program ...string) units.Agent {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	a := units.Agent{ID: id, Supervisor: units.Command{Path: self, Args: append([]string{self, "as"}, program...)}}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		for _, unit := range []string{units.SliceName(id), units.ServiceName(id), units.ScopeName(id)} {
			if err := c.Stop(ctx, unit, Replace); err != nil && !errors.Is(err, ErrNoSuchUnit) {
				t.Errorf("clean up: %v", err)
			}
			if err := c.ResetFailed(ctx, unit); err != nil && !errors.Is(err, ErrNoSuchUnit) {
				t.Errorf("clean up: %v", err)
			}
		}
		// Unloading is a step of its own, after the stop's job.
		until(t, "nothing of "+id+" is loaded", func() bool {
			list, err := c.List(ctx, "agent@"+id+".service", "agent-"+id+".scope", units.SliceName(id))
			if err != nil {
				t.Fatal(err)
			}
			return !slices.ContainsFunc(list, func(u Unit) bool { return u.Load == "loaded" })
		})
	})
	return a
}

// until waits for what no event tells, such as the end of a goroutine of a library.
func until(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		if time.Now().After(deadline) {
			t.Errorf("still not: %s", what)
			return
		}
		<-tick.C
	}
}

// expect reads changes until the unit is as wanted.
func expect(t *testing.T, c *Conn, changes <-chan Change, unit, what string, ok func(Properties) bool) {
	t.Helper()
	ctx := within(t)
	for {
		select {
		case change, open := <-changes:
			if !open {
				t.Fatalf("the watch ended before: %s", what)
			}
			p, err := c.Properties(ctx, unit)
			if err == nil && ok(p) {
				return
			}
			if err != nil && !errors.Is(err, ErrNoSuchUnit) {
				t.Fatalf("%s: after %+v: %v", what, change, err)
			}
		case <-ctx.Done():
			p, err := c.Properties(t.Context(), unit)
			state, _ := p.String("ActiveState")
			t.Fatalf("no change brought: %s (now %q, %v)", what, state, err)
		}
	}
}

func state(want string) func(Properties) bool {
	return func(p Properties) bool { s, _ := p.String("ActiveState"); return s == want }
}

func TestThisSystemdTakesEveryPropertyAndShowsItBack(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	t.Logf("systemd %d", c.Version())
	a := agent(t, c, "every-property_1", "ready")
	limits := units.Limits{
		MemoryHigh: new(uint64(1536 << 20)), MemoryMax: new(uint64(2 << 30)), MemorySwapMax: new(uint64(0)),
		CPUQuota: new(uint64(2_000_000)), CPUWeight: new(uint64(50)), TasksMax: new(uint64(512)),
	}
	a.Runtime, a.Total = limits, limits
	service := a.Service(c.Version())
	if err := c.StartTransient(ctx, a.Slice(c.Version()), Fail); err != nil {
		t.Fatal(err)
	}
	if err := c.StartTransient(ctx, service, Fail); err != nil {
		t.Fatal(err)
	}
	child := exec.Command("sleep", "1000")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.PidfdOpen(child.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	ended := make(chan error, 1)
	go func() { ended <- child.Wait() }()
	scope := a.Scope(c.Version(), units.Process{PID: uint32(child.Process.Pid), FD: fd})
	if err := c.StartTransient(ctx, scope, Fail); err != nil {
		t.Fatal(err)
	}
	if c.Version() >= 255 && scope.Get("PIDFDs") == nil {
		t.Error("no pidfd was used")
	}
	cgroup, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", child.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	if want := "/" + units.Root + "/" + units.SliceName(a.ID) + "/" + scope.Name; !strings.Contains(string(cgroup), want) {
		t.Errorf("the process is in %s; want %s", cgroup, want)
	}
	if unit, err := c.UnitOf(ctx, uint32(child.Process.Pid)); err != nil || unit != scope.Name {
		t.Errorf("unit of the process: %q, %v", unit, err)
	}
	for _, unit := range []units.Transient{a.Slice(c.Version()), service, scope} {
		p, err := c.Properties(ctx, unit.Name)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range unit.Properties {
			switch v := want.Value.(type) {
			case units.String:
				if got, _ := p.String(want.Name); got != string(v) {
					t.Errorf("%s %s is %q; want %q", unit.Name, want.Name, got, v)
				}
			case units.Uint64:
				got, ok := p.Uint64(want.Name)
				if want.Name == "TimeoutStartUSec" || want.Name == "TimeoutStopUSec" || ok {
					if got != uint64(v) {
						t.Errorf("%s %s is %d, %v; want %d", unit.Name, want.Name, got, ok, v)
					}
				} else {
					t.Errorf("%s %s is not set; want %d", unit.Name, want.Name, v)
				}
			case units.Uint32:
				if got, _ := p.Uint32(want.Name); got != uint32(v) {
					t.Errorf("%s %s is %d; want %d", unit.Name, want.Name, got, v)
				}
			case units.Strings:
				got, _ := p.Strings(want.Name)
				for _, name := range v {
					if !slices.Contains(got, name) {
						t.Errorf("%s %s is %q; %s is missing", unit.Name, want.Name, got, name)
					}
				}
			}
		}
	}
	if err := c.SetProperties(ctx, scope.Name, units.Limits{MemoryMax: new(uint64(3 << 30))}.Properties()...); err != nil {
		t.Error(err)
	}
	if p, err := c.Properties(ctx, scope.Name); err != nil {
		t.Error(err)
	} else if got, _ := p.Uint64("MemoryMax"); got != 3<<30 {
		t.Errorf("after a live change MemoryMax is %d", got)
	}
	// The scope goes when its service does, the slice stays.
	if err := c.Stop(ctx, service.Name, Replace); err != nil {
		t.Fatal(err)
	}
	<-ended
	until(t, "the scope is unloaded", func() bool { _, err := c.Properties(ctx, scope.Name); return errors.Is(err, ErrNoSuchUnit) })
}

func TestPropertyThatThisSystemdLacksIsNamed(t *testing.T) {
	c := needManager(t)
	a := agent(t, c, "lacks", "ready")
	service := a.Service(c.Version())
	service.Properties = append(service.Properties, units.Property{Name: "OfTomorrow", Value: units.Bool(true)})
	err := c.StartTransient(within(t), service, Fail)
	if !errors.Is(err, ErrBadProperty) || !strings.Contains(err.Error(), "OfTomorrow") {
		t.Errorf("got %v", err)
	}
}

func TestSupervisorStopsBeforeItsScopeAndStartsAfterIt(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	note := filepath.Join(t.TempDir(), "how")
	a := agent(t, c, "gate", "scope", "gate", note)
	if err := c.StartTransient(ctx, a.Slice(c.Version()), Fail, a.Service(c.Version())); err != nil {
		t.Fatal(err)
	}
	changes, err := c.Watch(ctx, units.ServiceName(a.ID))
	if err != nil {
		t.Fatal(err)
	}
	expect(t, c, changes, units.ServiceName(a.ID), "the slice started its agent", state("active"))
	p, err := c.Properties(ctx, units.ScopeName(a.ID))
	if err != nil || !state("active")(p) {
		t.Fatalf("the agent is ready, and its scope is not: %v", err)
	}
	// The process ends by its supervisor's hand.
	if err := c.Restart(ctx, units.ServiceName(a.ID), Replace); err != nil {
		t.Fatal(err)
	}
	if how, err := os.ReadFile(note); err != nil || string(how) != "signal: terminated" {
		t.Errorf("the process ended by %q, %v", how, err)
	}
	if err := c.Stop(ctx, units.ServiceName(a.ID), Replace); err != nil {
		t.Fatal(err)
	}
	p, err = c.Properties(ctx, units.ServiceName(a.ID))
	if err != nil {
		t.Fatalf("a stopped agent is not loaded: %v", err)
	}
	result, _ := p.String("Result")
	if !state("inactive")(p) || result != "success" {
		t.Errorf("after a stop: %v, result %q", p.m["ActiveState"], result)
	}
	// By anyone's hand, also once the manager was executed anew.
	reexec(t)
	if out, err := exec.CommandContext(ctx, "systemctl", "--user", "start", units.ServiceName(a.ID)).CombinedOutput(); err != nil {
		t.Errorf("systemctl start of a stopped agent: %v: %s", err, out)
	}
	if err := c.Stop(ctx, units.Root, Replace); err != nil {
		t.Fatal(err)
	}
	if p, err := c.Properties(ctx, units.ServiceName(a.ID)); err == nil && !state("inactive")(p) {
		t.Errorf("the slice of all agents stopped, and the agent is %v", p.m["ActiveState"])
	}
}

func reexec(t *testing.T) {
	t.Helper()
	if out, err := exec.CommandContext(within(t), "systemctl", "--user", "daemon-reexec").CombinedOutput(); err != nil {
		t.Fatalf("daemon-reexec: %v: %s", err, out)
	}
}

// transient is a plain service.
func transient(t *testing.T, c *Conn, name string, program []string, more ...units.Property) units.Transient {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		c.Kill(ctx, name, All, syscall.SIGKILL)
		c.Stop(ctx, name, Replace)
		c.ResetFailed(ctx, name)
	})
	return units.Transient{Name: name, Properties: append([]units.Property{
		{Name: "Type", Value: units.String("notify")},
		{Name: "StartLimitIntervalUSec", Value: units.Uint64(0)},
		{Name: "ExecStart", Value: units.Commands{{Path: self, Args: append([]string{self, "as"}, program...)}}},
	}, more...)}
}

func TestJobsTellTheirTrueResult(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	t.Run("done", func(t *testing.T) {
		u := transient(t, c, "job-done.service", []string{"ready"})
		if err := c.StartTransient(ctx, u, Fail); err != nil {
			t.Fatal(err)
		}
		if err := c.StartTransient(ctx, u, Fail); !errors.Is(err, ErrUnitExists) {
			t.Errorf("a second one: %v", err)
		}
		if err := c.Restart(ctx, u.Name, Replace); err != nil {
			t.Error(err)
		}
		if err := c.Stop(ctx, u.Name, Replace); err != nil {
			t.Error(err)
		}
	})
	t.Run("failed", func(t *testing.T) {
		u := transient(t, c, "job-failed.service", []string{"exit", "69"})
		err := c.StartTransient(ctx, u, Fail)
		var job *JobError
		if !errors.Is(err, ErrFailed) || !errors.As(err, &job) || job.Cause != "exit status 69: as told" {
			t.Errorf("got %v", err)
		}
		// A failed unit is in the way until it is reset.
		if err := c.StartTransient(ctx, u, Fail); !errors.Is(err, ErrUnitExists) {
			t.Errorf("over a failed one: %v", err)
		}
		if err := c.ResetFailed(ctx, u.Name); err != nil {
			t.Error(err)
		}
		if err := c.StartTransient(ctx, u, Fail); !errors.Is(err, ErrFailed) {
			t.Errorf("after a reset: %v", err)
		}
	})
	t.Run("timeout", func(t *testing.T) {
		u := transient(t, c, "job-timeout.service", []string{"never"}, units.Property{Name: "TimeoutStartUSec", Value: units.Uint64(200_000)})
		err := c.StartTransient(ctx, u, Fail)
		// For the manager a start that takes too long is a failure of the unit; its reason says timeout.
		if !errors.Is(err, ErrFailed) || !strings.Contains(err.Error(), "timeout") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("dependency", func(t *testing.T) {
		dep := transient(t, c, "job-needed.service", []string{"exit", "69"})
		u := transient(t, c, "job-dependent.service", []string{"ready"},
			units.Property{Name: "Requires", Value: units.Strings{dep.Name}}, units.Property{Name: "After", Value: units.Strings{dep.Name}})
		err := c.StartTransient(ctx, u, Fail, dep)
		if !errors.Is(err, ErrDependency) || !strings.Contains(err.Error(), "job-needed.service is failed (exit status 69: as told)") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("canceled", func(t *testing.T) {
		u := transient(t, c, "job-canceled.service", []string{"never"})
		started := make(chan error, 1)
		changes, err := c.Watch(ctx, u.Name)
		if err != nil {
			t.Fatal(err)
		}
		go func() { started <- c.StartTransient(ctx, u, Fail) }()
		expect(t, c, changes, u.Name, "the start is under way", state("activating"))
		if err := c.Stop(ctx, u.Name, Replace); err != nil {
			t.Error(err)
		}
		if err := <-started; !errors.Is(err, ErrCanceled) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("the caller gives up", func(t *testing.T) {
		u := transient(t, c, "job-given-up.service", []string{"never"})
		short, cancel := context.WithCancel(ctx)
		changes, err := c.Watch(ctx, u.Name)
		if err != nil {
			t.Fatal(err)
		}
		started := make(chan error, 1)
		go func() { started <- c.StartTransient(short, u, Fail) }()
		expect(t, c, changes, u.Name, "the start is under way", state("activating"))
		cancel()
		if err := <-started; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("no such unit", func(t *testing.T) {
		for what, err := range map[string]error{
			"start": c.Start(ctx, "agent@nobody.service", Replace), "stop": c.Stop(ctx, "agent@nobody.service", Replace),
			"kill": c.Kill(ctx, "agent@nobody.service", All, syscall.SIGTERM), "reset": c.ResetFailed(ctx, "agent@nobody.service"),
			"freeze": c.Freeze(ctx, "agent@nobody.service"), "properties": func() error { _, err := c.Properties(ctx, "agent@nobody.service"); return err }(),
		} {
			if !errors.Is(err, ErrNoSuchUnit) {
				t.Errorf("%s: %v", what, err)
			}
		}
	})
	t.Run("two hundred at once", func(t *testing.T) {
		u := transient(t, c, "job-many.service", []string{"ready"})
		if err := c.StartTransient(ctx, u, Fail); err != nil {
			t.Fatal(err)
		}
		results := make(chan error, 200)
		for i := range cap(results) {
			go func() {
				if i%2 == 0 {
					results <- c.Start(ctx, u.Name, Replace)
				} else {
					results <- c.Reload(ctx, u.Name, Replace)
				}
			}()
		}
		for range cap(results) {
			if err := <-results; err != nil && !errors.Is(err, ErrCanceled) && !errors.Is(err, ErrRefused) {
				t.Error(err)
			}
		}
	})
}

func TestWatchTellsOfStatusRestartsAndEnd(t *testing.T) {
	c := needManager(t)
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	a := agent(t, c, "watched", "ready")
	name := units.ServiceName(a.ID)
	changes, err := c.Watch(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	if first := <-changes; !first.Look || first.Unit != name {
		t.Errorf("the first change does not say to look: %+v", first)
	}
	if err := c.StartTransient(ctx, a.Slice(c.Version()), Fail); err != nil {
		t.Fatal(err)
	}
	if err := c.StartTransient(ctx, a.Service(c.Version()), Fail); err != nil {
		t.Fatal(err)
	}
	if err := c.Kill(ctx, name, Main, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	// From the signals alone, with no look in between.
	seen := map[string]bool{}
	for !seen["restarts 1"] || !seen["all well"] || !seen["signal"] {
		select {
		case change := <-changes:
			if n, ok := change.Properties.Uint32("NRestarts"); ok {
				seen[fmt.Sprintf("restarts %d", n)] = true
			}
			for _, property := range []string{"StatusText", "Result", "ActiveState"} {
				if s, ok := change.Properties.String(property); ok {
					seen[s] = true
				}
			}
		case <-ctx.Done():
			t.Fatalf("only seen: %v", seen)
		}
	}
	if err := c.Stop(ctx, units.SliceName(a.ID), Replace); err != nil {
		t.Fatal(err)
	}
	for gone := false; !gone; {
		select {
		case change := <-changes:
			gone = change.Gone
		case <-ctx.Done():
			t.Fatal("nothing said that the unit is gone")
		}
	}
	cancel()
	for range changes {
	}
}

func TestLookingDoesNotWakeTheWatcher(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	// Reading a unit that is not loaded would load and unload it: news, a look, and so for ever.
	changes, err := c.Watch(ctx, "agent@not-there.service")
	if err != nil {
		t.Fatal(err)
	}
	<-changes
	for range 20 {
		if _, err := c.Properties(ctx, "agent@not-there.service"); !errors.Is(err, ErrNoSuchUnit) {
			t.Fatal(err)
		}
	}
	// What the reads caused, if anything, is on the same connection ahead of this.
	sentinel := transient(t, c, "sentinel.service", []string{"ready"})
	if err := c.StartTransient(ctx, sentinel, Fail); err != nil {
		t.Fatal(err)
	}
	select {
	case change := <-changes:
		t.Errorf("woken by looking: %+v", change)
	default:
	}
}

// matches counts the match rules of this process's connections at the bus.
func matches(t *testing.T) int {
	t.Helper()
	conn, err := dial(t.Context(), Here(os.Getenv("XDG_RUNTIME_DIR"), "").Bus())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Getuid()))}); err != nil {
		t.Fatal(err)
	}
	if err := conn.Hello(); err != nil {
		t.Fatal(err)
	}
	var rules map[string][]string
	if err := conn.BusObject().Call("org.freedesktop.DBus.Debug.Stats.GetAllMatchRules", 0).Store(&rules); err != nil {
		t.Fatal(err)
	}
	n := 0
	for name, list := range rules {
		var pid uint32
		if conn.BusObject().Call("org.freedesktop.DBus.GetConnectionUnixProcessID", 0, name).Store(&pid) == nil && int(pid) == os.Getpid() {
			n += len(list)
		}
	}
	return n
}

func TestNothingIsLeftOfJobsAndWatches(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	u := transient(t, c, "leak.service", []string{"ready"})
	if err := c.StartTransient(ctx, u, Fail); err != nil {
		t.Fatal(err)
	}
	before := matches(t)
	if before < 1 {
		t.Fatal("the bus counts no match of ours: this test sees nothing")
	}
	goroutines := runtime.NumGoroutine()
	for i := range 50 {
		watching, stop := context.WithCancel(ctx)
		changes, err := c.Watch(watching, u.Name)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Restart(ctx, u.Name, Replace); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			if during := matches(t); during <= before {
				t.Errorf("%d matches while watching, %d before: this test sees nothing", during, before)
			}
		}
		canceled, cancel := context.WithCancel(ctx)
		cancel()
		if err := c.Start(canceled, u.Name, Replace); err == nil {
			t.Error("a canceled start succeeded")
		}
		if i == 25 {
			killBus(t, c)
			if err := c.Start(ctx, u.Name, Replace); err != nil {
				t.Fatal(err)
			}
		}
		stop()
		for range changes {
		}
	}
	if err := c.Start(ctx, u.Name, Replace); err != nil { // behind every removal on the same socket
		t.Fatal(err)
	}
	until(t, fmt.Sprintf("%d matches, as before", before), func() bool { return matches(t) == before })
	until(t, fmt.Sprintf("%d goroutines, as before", goroutines), func() bool { return runtime.NumGoroutine() <= goroutines })

	other, err := Connect(ctx, c.place, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Watch(ctx, u.Name); err != nil {
		t.Fatal(err)
	}
	other.Close()
	other.Close()
	if err := other.Start(ctx, u.Name, Replace); !errors.Is(err, ErrClosed) {
		t.Errorf("a closed connection: %v", err)
	}
	if _, err := other.Watch(ctx, u.Name); !errors.Is(err, ErrClosed) {
		t.Errorf("a closed connection: %v", err)
	}
	until(t, "no goroutine of a closed connection", func() bool { return runtime.NumGoroutine() <= goroutines })
}

// killBus kills the bus's process and returns when its socket is dead, with the age of the session
// that had it.
func killBus(t *testing.T, c *Conn) uint64 {
	t.Helper()
	s, age, err := c.session(within(t), 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	// Not more of it than its start limit allows: that is another story.
	if out, err := exec.CommandContext(within(t), "systemctl", "--user", "reset-failed", "dbus.service", "dbus.socket").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := c.Kill(within(t), "dbus.service", Main, syscall.SIGKILL); err != nil && !errors.Is(err, ErrBusGone) {
		t.Fatal(err)
	}
	select {
	case <-s.bus.Context().Done():
	case <-within(t).Done():
		t.Fatal("the bus was killed, and the connection is there")
	}
	return age
}

// restarts are what takes the bus or the manager away for a moment.
var restarts = map[string]func(*testing.T, *Conn){
	"the bus is killed":            func(t *testing.T, c *Conn) { killBus(t, c) },
	"the manager is executed anew": func(t *testing.T, _ *Conn) { reexec(t) },
	// Not at the same instant: a manager (of 252) that is executed anew between the death of the
	// bus and hearing of it waits 90 s for an answer from a socket that only it could serve.
	"first one, then the other, twice": func(t *testing.T, c *Conn) {
		for range 2 {
			if _, _, err := c.session(within(t), killBus(t, c), nil); err != nil {
				t.Fatal(err)
			}
			reexec(t)
		}
	},
	"the unit files are read anew": func(t *testing.T, c *Conn) {
		if err := c.ReloadManager(within(t)); err != nil {
			t.Fatal(err)
		}
	},
}

func TestBusOrManagerRestartsUnderAWatch(t *testing.T) {
	c := needManager(t)
	for name, restart := range restarts {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(within(t))
			defer cancel()
			u := transient(t, c, "survivor.service", []string{"ready"})
			if err := c.StartTransient(ctx, u, Fail); err != nil {
				t.Fatal(err)
			}
			changes, err := c.Watch(ctx, u.Name)
			if err != nil {
				t.Fatal(err)
			}
			<-changes
			restart(t, c)
			for looked := false; !looked; {
				select {
				case change := <-changes:
					looked = change.Look
				case <-ctx.Done():
					t.Fatal("nobody said to look again")
				}
			}
			// Signals come again. What was said to look at may have been the first of several
			// restarts, and the next may swallow the answer; a second SIGKILL does no harm here.
			for err := ErrBusGone; err != nil; {
				if err = c.Kill(ctx, u.Name, Main, syscall.SIGKILL); err != nil && !errors.Is(err, ErrBusGone) {
					t.Fatal(err)
				}
			}
			for failed := false; !failed; {
				select {
				case change := <-changes:
					state, _ := change.Properties.String("ActiveState")
					failed = state == "failed"
				case <-ctx.Done():
					t.Fatal("silent after the restart")
				}
			}
		})
	}
}

func TestWhatIsKnownIsAsNewAsTheLastAnswer(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	u := transient(t, c, "known.service", []string{"ready"})
	if err := c.StartTransient(ctx, u, Fail); err != nil {
		t.Fatal(err)
	}
	if _, ok := c.Known(u.Name); ok {
		t.Error("it is not watched, and known")
	}
	watching, stop := context.WithCancel(ctx)
	changes, err := c.Watch(watching, u.Name)
	if err != nil {
		t.Fatal(err)
	}
	// right compares what is known after some answer with what there is; unknown is never wrong.
	right := func(after string) (known bool) {
		t.Helper()
		for err := ErrBusGone; err != nil; {
			if _, err = c.List(ctx, "known.service"); err != nil && !errors.Is(err, ErrBusGone) {
				t.Fatal(err)
			}
		}
		k, known := c.Known(u.Name)
		p, err := c.Properties(ctx, u.Name)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range k.Names() {
			if got, want := fmt.Sprint(k.m[name]), fmt.Sprint(p.m[name]); got != want {
				t.Errorf("%s: %s is known to be %s, and is %s", after, name, got, want)
			}
		}
		return known
	}
	right("the beginning")
	for range 20 {
		if err := c.Restart(ctx, u.Name, Replace); err != nil {
			t.Fatal(err)
		}
		if !right("a restart of the unit") {
			t.Error("the unit was restarted, and the manager is to be asked how it is")
		}
	}
	for name, restart := range restarts {
		epoch := c.Epoch()
		restart(t, c)
		right(name)
		if c.Epoch() == epoch {
			t.Errorf("%s: nobody is told that unit files may have been read", name)
		}
	}
	// A stranger's word is not the manager's.
	if out, err := exec.CommandContext(ctx, "busctl", "--user", "emit", string(objectPath(u.Name)), properties, "PropertiesChanged", "sa{sv}as", systemd+".Service", "1", "StatusText", "s", "a lie", "0").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	right("a stranger's signal")
	stop()
	for range changes {
	}
	if _, ok := c.Known(u.Name); ok {
		t.Error("nobody watches it any more, and it is known")
	}
}

func TestBusOrManagerRestartsUnderAJob(t *testing.T) {
	c := needManager(t)
	for name, restart := range restarts {
		t.Run(name, func(t *testing.T) {
			ctx := within(t)
			u := transient(t, c, "slow.service", []string{"never"}, units.Property{Name: "TimeoutStartUSec", Value: units.Uint64(3_000_000)})
			changes, err := c.Watch(ctx, u.Name)
			if err != nil {
				t.Fatal(err)
			}
			started := make(chan error, 1)
			go func() { started <- c.StartTransient(ctx, u, Fail) }()
			expect(t, c, changes, u.Name, "the start is under way", state("activating"))
			restart(t, c)
			select {
			case err := <-started:
				if !errors.Is(err, ErrFailed) || !strings.Contains(err.Error(), "timeout") {
					t.Errorf("got %v; want the job's own end", err)
				}
			case <-ctx.Done():
				t.Error("the job's end never came")
			}
		})
	}
}

func TestCallsWhileTheBusIsGoneWaitForIt(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	u := transient(t, c, "patient.service", []string{"ready"})
	if err := c.StartTransient(ctx, u, Fail); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		killBus(t, c)
		if _, err := c.Properties(ctx, u.Name); err != nil {
			t.Fatal(err)
		}
		reexec(t)
		if err := c.Start(ctx, u.Name, Replace); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStoredDescriptorSurvivesARestartAndIsGoneAtAStop(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	a := agent(t, c, "stores", "store")
	name := units.ServiceName(a.ID)
	if err := c.StartTransient(ctx, a.Slice(c.Version()), Fail); err != nil {
		t.Fatal(err)
	}
	if err := c.StartTransient(ctx, a.Service(c.Version()), Fail); err != nil {
		t.Fatal(err)
	}
	changes, err := c.Watch(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	status := func(want string) func(Properties) bool {
		return func(p Properties) bool { s, _ := p.String("StatusText"); return s == want }
	}
	expect(t, c, changes, name, "stored", status("stored"))
	if err := c.Kill(ctx, name, Main, syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	expect(t, c, changes, name, "handed back after a failure", status("handed spec sealed"))
	reexec(t)
	if err := c.Kill(ctx, name, Main, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	expect(t, c, changes, name, "handed back after re-execution and SIGKILL", func(p Properties) bool {
		n, _ := p.Uint32("NRestarts")
		return n == 2 && status("handed spec sealed")(p)
	})
	if err := c.Restart(ctx, name, Replace); err != nil {
		t.Fatal(err)
	}
	expect(t, c, changes, name, "handed back after a restart by hand", status("handed spec sealed"))
	if err := c.Stop(ctx, name, Replace); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(ctx, name, Replace); err != nil {
		t.Fatal(err)
	}
	p, err := c.Properties(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	if s, _ := p.String("StatusText"); s != "stored" {
		t.Errorf("after a stop and a start: %q; the descriptor should be gone", s)
	}
}

func TestRestartStormEndsFailedAndSaysSo(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	a := agent(t, c, "storm", "exit", "1")
	name := units.ServiceName(a.ID)
	service := a.Service(c.Version())
	for i, p := range service.Properties {
		switch p.Name {
		case "RestartUSec", "RestartMaxDelayUSec": // the same in a hurry
			service.Properties[i].Value = units.Uint64(1000)
		}
	}
	changes, err := c.Watch(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.StartTransient(ctx, service, Fail); !errors.Is(err, ErrFailed) {
		t.Fatalf("got %v", err)
	}
	expect(t, c, changes, name, "a failed state", state("failed"))
	p, err := c.Properties(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	n, _ := p.Uint32("NRestarts")
	result, _ := p.String("Result")
	t.Logf("%d restarts, result %s", n, result)
	if n != 5 {
		t.Errorf("%d restarts before it is given up on", n)
	}
}

func TestExitThatAnotherStartWouldRepeatIsNotRestarted(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	for _, code := range []string{"69", "78"} {
		a := agent(t, c, "final-"+code, "exit", code)
		name := units.ServiceName(a.ID)
		err := c.StartTransient(ctx, a.Service(c.Version()), Fail)
		if !errors.Is(err, ErrFailed) || !strings.Contains(err.Error(), "exit status "+code) {
			t.Errorf("got %v", err)
		}
		p, err := c.Properties(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		if n, _ := p.Uint32("NRestarts"); n != 0 || !state("failed")(p) {
			t.Errorf("exit %s: %d restarts, %v", code, n, p.m["ActiveState"])
		}
	}
}

func TestFreezingTheSliceFreezesTheRuntime(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	note := filepath.Join(t.TempDir(), "how")
	a := agent(t, c, "cold", "scope", "cold", note)
	if err := c.StartTransient(ctx, a.Slice(c.Version()), Fail); err != nil {
		t.Fatal(err)
	}
	if err := c.StartTransient(ctx, a.Service(c.Version()), Fail); err != nil {
		t.Fatal(err)
	}
	p, err := c.Properties(ctx, units.ScopeName(a.ID))
	if err != nil {
		t.Fatal(err)
	}
	cgroup, _ := p.String("ControlGroup")
	frozen := func() bool {
		events, err := os.ReadFile("/sys/fs/cgroup" + cgroup + "/cgroup.events")
		return err == nil && strings.Contains(string(events), "frozen 1")
	}
	if err := c.Freeze(ctx, units.SliceName(a.ID)); err != nil {
		t.Fatal(err)
	}
	if !frozen() {
		t.Error("the slice is frozen, and the runtime is not")
	}
	if err := c.Thaw(ctx, units.SliceName(a.ID)); err != nil {
		t.Fatal(err)
	}
	if frozen() {
		t.Error("the slice is thawed, and the runtime is not")
	}
}

// install puts unit files where the user's own are, until the test's end.
func install(t *testing.T, c *Conn, files ...units.File) string {
	t.Helper()
	home, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(home, ".config/systemd/user")
	for _, f := range files {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, f.Name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, f.Name), []byte(f.Text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		for _, f := range files {
			// The probe refuses to be stopped, but not without its file's word on it.
			if filepath.Ext(f.Name) == ".service" {
				os.WriteFile(filepath.Join(dir, f.Name), []byte("[Service]\nType=oneshot\nExecStart=/bin/true\n"), 0o644)
			}
		}
		if err := c.ReloadManager(ctx); err != nil {
			t.Errorf("clean up: %v", err)
		}
		for _, f := range files {
			if err := c.Stop(ctx, f.Name, Replace); err != nil && filepath.Ext(f.Name) == ".service" && !errors.Is(err, ErrNoSuchUnit) {
				t.Errorf("clean up: %v", err)
			}
			c.ResetFailed(ctx, f.Name)
			os.Remove(filepath.Join(dir, f.Name))
		}
		if err := c.ReloadManager(ctx); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	if err := c.ReloadManager(within(t)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestProbeUnitGuardsSandboxedAgents(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	dir := t.TempDir()
	verdict := filepath.Join(dir, "verdict")
	program := filepath.Join(dir, "agentconnect")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nexit $(cat "+verdict+")\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	say := func(code string) {
		if err := os.WriteFile(verdict, []byte(code), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	install(t, c, units.Files(program)...)
	a := agent(t, c, "guarded", "ready")
	a.Sandboxed = true
	name := units.ServiceName(a.ID)
	if err := c.StartTransient(ctx, a.Slice(c.Version()), Fail); err != nil {
		t.Fatal(err)
	}

	say("69")
	err := c.StartTransient(ctx, a.Service(c.Version()), Fail)
	if !errors.Is(err, ErrDependency) || !strings.Contains(err.Error(), units.Probe+" is failed (exit status 69)") {
		t.Fatalf("a failed probe: %v", err)
	}
	p, err := c.Properties(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	if pid, _ := p.Uint32("ExecMainPID"); pid != 0 {
		t.Errorf("a process of the agent has run: %d", pid)
	}
	for range 20 {
		if err := c.Start(ctx, name, Replace); !errors.Is(err, ErrDependency) {
			t.Fatalf("refused again and again: %v", err)
		}
	}
	say("0")
	if err := c.Start(ctx, name, Replace); err != nil {
		t.Fatalf("the probe passes again: %v", err)
	}
	p, err = c.Properties(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	pid, _ := p.Uint32("MainPID")
	// Probing again, with whatever result, is not the agent's end; nor can a person stop the probe.
	for _, code := range []string{"0", "69", "69"} {
		say(code)
		err := c.Reload(ctx, units.Probe, Replace)
		if (err != nil) != (code != "0") {
			t.Errorf("probing again, with %s: %v", code, err)
		}
	}
	if err := c.Stop(ctx, units.Probe, Replace); !errors.Is(err, ErrRefused) {
		t.Errorf("stop of the probe: %v", err)
	}
	restartErr := c.Restart(ctx, units.Probe, Replace)
	t.Logf("restart of the probe: %v", restartErr)
	p, err = c.Properties(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	if now, _ := p.Uint32("MainPID"); now != pid || pid == 0 {
		t.Errorf("the supervisor was process %d and is %d", pid, now)
	}
	say("0")
}

func TestUnitFilesAndDropIns(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	dir := install(t, c, append(units.Files("/bin/true"), units.File{Name: "agent@.service.d/local.conf", Text: "[Unit]\nDescription=of the house\n"})...)
	if err := c.Enable(ctx, units.Daemon); err != nil {
		t.Fatal(err)
	}
	f, err := c.UnitFile(ctx, units.Daemon)
	if err != nil || f.Fragment != filepath.Join(dir, units.Daemon) || f.State != "enabled" || f.Load != "loaded" || f.NeedReload {
		t.Errorf("%+v, %v", f, err)
	}
	if err := os.WriteFile(filepath.Join(dir, units.Daemon), []byte(units.Files("/bin/false")[0].Text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(filepath.Join(dir, units.Daemon), time.Now(), time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if f, err := c.UnitFile(ctx, units.Daemon); err != nil || f.Load == "loaded" && !f.NeedReload && f.Fragment == "" {
		t.Errorf("changed on disk: %+v, %v", f, err)
	}
	if err := c.Disable(ctx, units.Daemon); err != nil {
		t.Fatal(err)
	}
	if f, err := c.UnitFile(ctx, units.Daemon); err != nil || f.State != "disabled" {
		t.Errorf("%+v, %v", f, err)
	}
	if f, err := c.UnitFile(ctx, "agentconnect-absent.service"); err != nil || f.Load != "not-found" || f.Fragment != "" {
		t.Errorf("%+v, %v", f, err)
	}
	a := agent(t, c, "local", "ready")
	if err := c.StartTransient(ctx, a.Service(c.Version()), Fail); err != nil {
		t.Fatal(err)
	}
	f, err = c.UnitFile(ctx, units.ServiceName(a.ID))
	if err != nil || f.State != "transient" || !slices.Contains(f.DropIns, filepath.Join(dir, "agent@.service.d/local.conf")) {
		t.Errorf("%+v, %v", f, err)
	}
}

func TestUnderStrangersSignalsNothingHappens(t *testing.T) {
	c := needManager(t)
	ctx := within(t)
	u := transient(t, c, "spoofed.service", []string{"never"})
	changes, err := c.Watch(ctx, u.Name)
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithCancel(ctx)
	started := make(chan error, 1)
	go func() { started <- c.StartTransient(short, u, Fail) }()
	expect(t, c, changes, u.Name, "the start is under way", state("activating"))
	c.mu.Lock()
	ours := c.current.bus.Names()[0]
	c.mu.Unlock()
	// Another program on the bus says that each job there can be is done.
	stranger, err := dial(ctx, c.place.Bus(), dbus.WithOutgoingInterceptor(func(msg *dbus.Message) {
		if msg.Type == dbus.TypeSignal {
			msg.Headers[dbus.FieldDestination] = dbus.MakeVariant(ours)
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	if err := stranger.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Getuid()))}); err != nil {
		t.Fatal(err)
	}
	if err := stranger.Hello(); err != nil {
		t.Fatal(err)
	}
	for id := range uint32(2000) {
		job := dbus.ObjectPath(fmt.Sprintf("/org/freedesktop/systemd1/job/%d", id))
		if err := stranger.Emit(managerPath, manager+".JobRemoved", id, job, u.Name, "done"); err != nil {
			t.Fatal(err)
		}
	}
	if err := stranger.BusObject().Call(bus+".GetId", 0).Err; err != nil { // all of it has reached the bus
		t.Fatal(err)
	}
	if _, err := c.Properties(ctx, u.Name); err != nil { // and us
		t.Fatal(err)
	}
	select {
	case err := <-started:
		t.Fatalf("a stranger ended our waiting: %v", err)
	default:
	}
	cancel()
	<-started
}

func BenchmarkConnect(b *testing.B) {
	if os.Getenv("AGENTCONNECT_TEST_MACHINE") == "" {
		b.Skip("missing: the test machine")
	}
	for b.Loop() {
		c, err := Connect(b.Context(), Here(os.Getenv("XDG_RUNTIME_DIR"), "tester"), nil)
		if err != nil {
			b.Fatal(err)
		}
		c.Close()
	}
}

func BenchmarkScope(b *testing.B) {
	if os.Getenv("AGENTCONNECT_TEST_MACHINE") == "" {
		b.Skip("missing: the test machine")
	}
	c, err := Connect(b.Context(), Here(os.Getenv("XDG_RUNTIME_DIR"), "tester"), nil)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		child := exec.Command("sleep", "1000")
		if err := child.Start(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		scope := units.Transient{Name: fmt.Sprintf("bench-%d.scope", i), Properties: []units.Property{
			{Name: "PIDs", Value: units.PIDs{uint32(child.Process.Pid)}}, {Name: "CollectMode", Value: units.String("inactive-or-failed")},
		}}
		err := c.StartTransient(b.Context(), scope, Fail)
		b.StopTimer()
		child.Process.Kill()
		child.Wait()
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
