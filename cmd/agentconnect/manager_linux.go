// The user's service manager: whether it keeps the agents, and the daemon as its unit.

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"agentconnect.md/sandbox/cmd/internal/cgroup"
	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/daemon"
	"agentconnect.md/sandbox/cmd/internal/programs"
	"agentconnect.md/sandbox/cmd/internal/stops"
	"agentconnect.md/sandbox/cmd/internal/systemd"
	"agentconnect.md/sandbox/dbusctl"
	"agentconnect.md/sandbox/units"
)

// place is where this user's manager is expected.
func (a *app) place() dbusctl.Place {
	return dbusctl.Here(a.getenv("XDG_RUNTIME_DIR"), userName(a.uid))
}

// connect connects to the user's manager.
func (a *app) connect(ctx context.Context) (*dbusctl.Conn, error) {
	return dbusctl.Connect(ctx, a.place(), nil)
}

// managerPatience is how long the manager's own daemon waits for it to answer: the bus may
// be restarting. It is less than the start may take.
const managerPatience = 75 * time.Second

// managed connects to the user's manager if it is to keep the agents, and says in a note
// what is the case: auto takes the manager where it answers and our units are installed.
// What the manager itself started is never without one: agents run in its units, and a
// daemon that took them for its own children would be a second hand on them.
func (a *app) managed(ctx context.Context, cfg *config.Config) (conn *dbusctl.Conn, note string, err error) {
	if cfg.Supervisor == "direct" {
		return nil, directNote, nil
	}
	ours := false
	if group, gerr := cgroup.Of(os.Getpid()); gerr == nil {
		ours = group.Unit() == units.Daemon
	}
	conn, err = a.answering(ctx)
	for end := time.Now().Add(managerPatience); ours && err != nil && time.Now().Before(end); conn, err = a.answering(ctx) {
		select {
		case <-ctx.Done():
			return nil, "", ctx.Err()
		case <-time.After(time.Second / 4):
		}
	}
	switch {
	case err == nil:
		note = "agents are units of the user manager (systemd " + fmt.Sprint(int(conn.Version())) + ")"
		if lerr := a.place().Lingering(); lerr != nil {
			note += "; " + lerr.Error()
		}
		return conn, note, nil
	case ours:
		return nil, "", &daemon.Refusal{Code: 75, Text: "the user manager started this daemon and does not answer it: " + err.Error()}
	case cfg.Supervisor == "systemd":
		return nil, "", &daemon.Refusal{Code: 78, Text: fmt.Sprintf("supervisor systemd: %v (or use --supervisor direct)", err)}
	}
	return nil, directNote + " (" + err.Error() + ")", nil
}

// answering connects to the manager and sees that our units are installed.
func (a *app) answering(ctx context.Context) (*dbusctl.Conn, error) {
	conn, err := a.connect(ctx)
	if err != nil {
		return nil, err
	}
	if err := installed(ctx, conn); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// installed checks that the units which agents hang on are there.
func installed(ctx context.Context, conn *dbusctl.Conn) error {
	for _, unit := range []string{units.Probe, units.Root} {
		f, err := conn.UnitFile(ctx, unit)
		if err != nil {
			return err
		}
		if f.Load != "loaded" {
			return fmt.Errorf("%s is %s: the units are not installed; install the package agentconnect-sandbox", unit, f.Load)
		}
	}
	return nil
}

// manage is daemon.Options.Manage over a connection.
func manage(conn *dbusctl.Conn, set programs.Set) func(daemon.ManagerDeps) (daemon.Supervision, error) {
	return func(deps daemon.ManagerDeps) (daemon.Supervision, error) {
		return systemd.New(systemd.Options{
			Conn: conn, Supervisor: set.Supervisor, Socket: deps.Socket, SpecSocket: deps.SpecSocket,
			Direct: deps.Direct, Stopped: deps.Stopped, Started: deps.Started, Log: deps.Log,
		}), nil
	}
}

// unitProber probes by the probe's unit, whose state decides over the agents' starts. The
// file that it leaves is the result.
func unitProber(conn *dbusctl.Conn, root string) daemon.Prober {
	return func(ctx context.Context, _ string) control.Probe {
		failed := func(err error) control.Probe {
			p := failedProbe(err)
			if ctx.Err() != nil {
				return *p // given up, which says nothing of the boundary
			}
			if werr := daemon.WriteProbe(root, p); werr != nil {
				p.Checks[0].Detail += "; " + werr.Error()
			}
			return *p
		}
		p, err := conn.Properties(ctx, units.Probe)
		if err != nil && !errors.Is(err, dbusctl.ErrNoSuchUnit) { // not loaded: it has not run yet
			return failed(err)
		}
		// To stop or restart the unit would do the same to every agent: it is reloaded.
		if active, _ := p.String("ActiveState"); active == "active" {
			err = conn.Reload(ctx, units.Probe, dbusctl.Replace)
		} else {
			if rerr := conn.ResetFailed(ctx, units.Probe); rerr != nil && !errors.Is(rerr, dbusctl.ErrNoSuchUnit) {
				return failed(rerr)
			}
			err = conn.Start(ctx, units.Probe, dbusctl.Replace)
		}
		var job *dbusctl.JobError
		if err != nil && !errors.As(err, &job) {
			return failed(err)
		}
		result, rerr := daemon.ReadProbe(root)
		if rerr != nil {
			return failed(errors.Join(err, rerr))
		}
		if result.OK && err != nil {
			return failed(err)
		}
		return *result
	}
}

// shadowed reports a unit file of the daemon's name in the user's own folder: an older
// program wrote it, and it would run instead of ours.
func shadowed(ctx context.Context, conn *dbusctl.Conn) error {
	f, err := conn.UnitFile(ctx, units.Daemon)
	if err != nil {
		return err
	}
	switch {
	case f.Load == "not-found":
		return fmt.Errorf("%s is not installed: install the package agentconnect-sandbox, or run `agentconnect run` in a terminal or under your init", units.Daemon)
	case strings.HasPrefix(f.Fragment, "/usr/"), strings.HasPrefix(f.Fragment, "/etc/"):
		return nil
	}
	return &daemon.Refusal{Code: 1, Text: fmt.Sprintf("%s is another program's unit file and would run in our place; to move over: systemctl --user disable --now %s; rm %s; systemctl --user daemon-reload; agentconnect up", f.Fragment, units.Daemon, f.Fragment)}
}

// up enables and starts the daemon's unit.
func (a *app) up(ctx context.Context) error {
	conn, err := a.connect(ctx)
	if errors.Is(err, dbusctl.ErrNoBus) {
		// A manager that was up before the bus was installed has none until somebody asks.
		if serr := exec.CommandContext(ctx, "systemctl", "--user", "start", "dbus.socket").Run(); serr == nil {
			conn, err = a.connect(ctx)
		}
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errNoManager, err)
	}
	defer conn.Close()
	if err := shadowed(ctx, conn); err != nil {
		return err
	}
	started := a.startUnit(ctx, conn, conn.Start)
	if errors.As(started, new(*otherRootError)) {
		return started
	}
	if err := conn.Enable(ctx, units.Daemon); err != nil {
		return err
	}
	if started != nil {
		return started
	}
	if err := a.say(map[string]any{"state": control.StateRunning}, "the daemon runs (%s); it starts with your session", units.Daemon); err != nil {
		return err
	}
	if err := a.place().Lingering(); err != nil {
		a.warn("%v, or: agentconnect up --linger", err)
	}
	return nil
}

// linger has the manager start at boot and outlive the last session. A user may ask that
// for himself where polkit is installed.
func (a *app) linger(ctx context.Context) error {
	if a.place().Lingering() == nil {
		return nil
	}
	out, err := exec.CommandContext(ctx, "loginctl", "--no-ask-password", "enable-linger").CombinedOutput()
	if err != nil {
		return fmt.Errorf("linger: loginctl: %s: %w; run: sudo loginctl enable-linger %s", strings.TrimSpace(string(out)), err, userName(a.uid))
	}
	return nil
}

// serves reports whether the daemon that the manager runs, if it runs one, is that of root: a
// user may have several, each of a ROOT of its own.
func serves(p dbusctl.Properties, root string) bool {
	active, _ := p.String("ActiveState")
	pid, _ := p.Uint32("MainPID")
	return active != "active" || int(pid) == daemon.Holder(root)
}

// startUnit starts or restarts the daemon's unit and says why it did not come up, in the
// daemon's own words and with its exit code.
func (a *app) startUnit(ctx context.Context, conn *dbusctl.Conn, start func(context.Context, string, dbusctl.Mode) error) error {
	root, err := a.plainRoot()
	if err != nil {
		return err
	}
	if p, err := conn.Properties(ctx, units.Daemon); err == nil && !serves(p, root) {
		return &otherRootError{root}
	}
	if err := conn.ResetFailed(ctx, units.Daemon); err != nil && !errors.Is(err, dbusctl.ErrNoSuchUnit) {
		return err
	}
	err = start(ctx, units.Daemon, dbusctl.Replace)
	p, perr := conn.Properties(ctx, units.Daemon)
	switch {
	case err == nil && perr == nil && !serves(p, root):
		return errors.Join(&otherRootError{root}, conn.Stop(ctx, units.Daemon, dbusctl.Replace))
	case err == nil || perr != nil:
		return err
	}
	code, _ := p.Int32("ExecMainStatus")
	st, serr := a.status(ctx)
	if serr == nil && st.State == control.StateRefused && code == int32(st.ExitCode) { //nolint:gosec // an exit code
		return &daemon.Refusal{Code: st.ExitCode, Text: st.Reason}
	}
	return fmt.Errorf("%w; see `journalctl --user -u %s`", err, units.Daemon)
}

// downUnit stops the daemon and all agents, where the manager keeps them. It reports
// false where the daemon is not the manager's.
func (a *app) downUnit(ctx context.Context, root string) (bool, error) {
	conn, err := a.connect(ctx)
	if err != nil {
		return false, nil // without a manager the daemon is asked itself
	}
	defer conn.Close()
	p, err := conn.Properties(ctx, units.Daemon)
	if err != nil {
		return false, nil // it is not loaded
	}
	if active, _ := p.String("ActiveState"); active != "active" && active != "activating" && active != "reloading" {
		return false, nil
	}
	if !serves(p, root) {
		return false, nil
	}
	// The daemon first: it must not take the agents' end for a person's wish.
	if err := conn.Stop(ctx, units.Daemon, dbusctl.Replace); err != nil {
		return true, err
	}
	err = conn.Stop(ctx, units.Root, dbusctl.Replace)
	if errors.Is(err, dbusctl.ErrNoSuchUnit) {
		err = nil
	}
	// Nor the next one: what runs now is to come back with it. A stop that somebody else made
	// before was taken over by the daemon that ran until now.
	ids, lerr := stops.List(root)
	err = errors.Join(err, lerr)
	for _, id := range ids {
		err = errors.Join(err, stops.Drop(root, id))
	}
	return true, err
}

// restartUnit restarts the daemon's unit; agents go on.
func (a *app) restartUnit(ctx context.Context) error {
	conn, err := a.connect(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", errNoManager, err)
	}
	defer conn.Close()
	if err := shadowed(ctx, conn); err != nil {
		return err
	}
	if err := a.startUnit(ctx, conn, conn.Restart); err != nil {
		return err
	}
	return a.say(map[string]any{"state": control.StateRunning}, "the daemon was restarted; the agents went on")
}

// dropIns are the files by which somebody changes the agent's units; none where no manager
// answers.
func (a *app) dropIns(ctx context.Context, id string) []string {
	conn, err := a.connect(ctx)
	if err != nil {
		return nil
	}
	defer conn.Close()
	files, err := systemd.DropIns(ctx, conn, id)
	if err != nil {
		a.warn("whether somebody changed the units of %s is not known: %v", id, err)
	}
	return files
}

// journal prints an agent's log from the journal, where the service manager keeps the
// agents. It reports false where it does not.
func (a *app) journal(ctx context.Context, s *site, id string, lines int, follow bool) (bool, error) {
	if s.cfg.Supervisor == "direct" || a.place().Check() != nil {
		return false, nil //nolint:nilerr // without a manager the log is a file
	}
	if st, err := s.client().Status(ctx); err == nil && st.Supervisor != "systemd" {
		return false, nil
	}
	args := []string{"--user", "--quiet", "--no-pager", "--output=short-iso", "--unit=" + units.ServiceName(id), "--lines=" + strconv.Itoa(lines)}
	if follow {
		args = append(args, "--follow")
	}
	cmd := exec.CommandContext(ctx, "journalctl", args...)
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.StdoutPipe()
	if err != nil {
		return true, err
	}
	if err := cmd.Start(); err != nil {
		return true, fmt.Errorf("agent %s: its log is in the journal: %w", id, err)
	}
	r := bufio.NewReader(out)
	var perr error
	for perr == nil {
		line, err := r.ReadString('\n')
		if line != "" {
			perr = a.logLines([]string{strings.TrimSuffix(line, "\n")})
		}
		if err != nil {
			break
		}
	}
	if perr != nil {
		_ = cmd.Process.Kill() // nobody reads on
	}
	if err := cmd.Wait(); err != nil && perr == nil && ctx.Err() == nil {
		perr = fmt.Errorf("agent %s: its log is in the journal: %w: %s", id, err, strings.TrimSpace(said.String()))
	}
	return true, perr
}
