// `make test-attack`: every attack inside, with nesting off and on, beside the same attempt
// outside, as the user and as root of namespaces of the user's own. What works in neither place
// outside proves nothing here and is counted apart.

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"text/tabwriter"

	"agentconnect.md/sandbox/cmd/internal/selftest"
)

// line is one attack of the suite.
type line struct {
	row
	Nested selftest.Seen // inside, with nesting on; empty: not tried there
	AsRoot selftest.Seen // outside, as root of own namespaces
}

// proven: it failed inside and works somewhere outside.
func (l line) proven() bool {
	return l.Kind == selftest.MustFail && l.Seen == selftest.Refused && (l.Outside == selftest.Worked || l.AsRoot == selftest.Worked)
}

func (s *stage) suite(ctx context.Context, out io.Writer, least int, rows []row, targets *selftest.Targets, words []byte) error {
	aim := *targets
	aim.Nesting, aim.Workspace, aim.Memory = true, s.workspace(nested), filepath.Join(s.root, "agents", nested, "memory")
	aim.Git = s.planted(nested)
	// What the other agent was given.
	aim.ExposedSocket, aim.WorkspaceSocket, aim.Link, aim.Pinned = "", "", "", nil
	attack, err := json.Marshal(aim)
	if err != nil {
		return err
	}
	on, err := s.turn(ctx, nested, attack)
	if err != nil {
		return err
	}
	root, err := s.asRoot(ctx, words)
	if err != nil {
		return err
	}
	seen := func(r *selftest.Report) map[string]selftest.Result {
		m := map[string]selftest.Result{}
		for _, x := range r.Results {
			m[x.ID] = x
		}
		return m
	}
	nestedSeen, rootSeen := seen(on), seen(root)
	var lines []line
	for _, r := range rows {
		n := nestedSeen[r.ID]
		if !n.OK && n.Seen != "" && r.Wrong == "" {
			r.Wrong = fmt.Sprintf("with nesting on: expected %s, seen %s: %s", n.Expected, n.Seen, n.Detail)
		}
		lines = append(lines, line{row: r, Nested: n.Seen, AsRoot: rootSeen[r.ID].Seen})
	}
	for _, w := range s.ways() {
		lines = append(lines, line{row: w.try(ctx)})
	}
	return report(out, least, lines)
}

// asRoot runs the table as root of namespaces that any user can make: what the kernel refuses
// to an ordinary user it often allows there, and a program inside must not get there.
func (s *stage) asRoot(ctx context.Context, targets []byte) (*selftest.Report, error) {
	guest := filepath.Join(s.bin, "agentconnect-guest")
	cmd := exec.CommandContext(ctx, "/bin/sh", append([]string{"-c", `mount -t proc proc /proc && exec "$0" "$@"`, guest}, controlArgs...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS | syscall.CLONE_NEWCGROUP,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	return s.control(cmd, targets)
}

func report(out io.Writer, least int, lines []line) error {
	section(out, "every attack")
	table := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(table, "\tATTACK\tSTANDS FOR\tWHAT\tINSIDE\tNESTING ON\tOUTSIDE\tOWN NAMESPACE")
	proven, void, wrong, works := 0, 0, 0, 0
	for _, l := range lines {
		mark := "proven"
		switch {
		case l.Wrong != "":
			mark = "WRONG"
			wrong++
		case l.Kind == selftest.MustWork:
			mark = "works"
			works++
		case l.proven():
			proven++
		default:
			mark = "void"
			void++
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", mark, l.ID, l.Ref, l.Title, l.Seen, l.Nested, l.Outside, l.AsRoot)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(out, "\n%d attacks refused inside whose control works outside; %d that work in neither place on this machine prove nothing here; %d promised things work.\n", proven, void, works)
	for _, l := range lines {
		if l.Wrong != "" {
			fmt.Fprintf(out, "WRONG %s: %s\n", l.ID, l.Wrong)
		}
	}
	switch {
	case wrong > 0:
		return fmt.Errorf("%d of %d lines are not as they should be", wrong, len(lines))
	case proven < least:
		return fmt.Errorf("%d attacks are proven, at least %d must be", proven, least)
	}
	return nil
}
