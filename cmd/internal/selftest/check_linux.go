// The probe's inside part: what must be out of reach, what must be in reach, and
// whether namespaces, capabilities and the filter are as promised.

package selftest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Check looks at what req names and at what every boundary promises. It reports, and
// leaves the judgement to the probe. A check that cannot be made is not OK.
func Check(ctx context.Context, req CheckRequest) CheckReport {
	var rep CheckReport
	add := func(what, path string, err error, good string) {
		r := CheckResult{What: what, Path: path, OK: err == nil, Detail: good}
		if err != nil {
			r.Detail = err.Error()
		}
		rep.Results = append(rep.Results, r)
	}
	for _, p := range req.Unreachable {
		why, err := unreachable(p)
		add(CheckUnreachable, p, err, why)
	}
	for _, p := range req.ConnectRefused {
		err := connectUnix(ctx, p)
		if err == nil {
			add(CheckConnectRefused, p, errors.New("connected"), "")
		} else {
			add(CheckConnectRefused, p, nil, err.Error())
		}
	}
	for _, p := range req.Writable {
		_, err := create(p)
		add(CheckWritable, p, err, "made and removed a file")
	}
	for _, p := range req.Readable {
		add(CheckReadable, p, readable(p), "readable")
	}
	add(CheckLoopback, "", talk(ctx, "tcp4", "127.0.0.1:0"), "listened and connected on 127.0.0.1")
	proc, err := procIsFresh()
	add(CheckProc, "/proc", err, proc)
	held, err := heldCapabilities()
	if err == nil && len(held) > 0 {
		err = fmt.Errorf("held: %s", strings.Join(held, ", "))
	}
	add(CheckCapabilities, "", err, "all sets are empty")
	s, err := status("self")
	want := func(field, value string) error {
		if err != nil {
			return err
		}
		if s[field] != value {
			return fmt.Errorf("%s is %q, want %s", field, s[field], value)
		}
		return nil
	}
	add(CheckNoNewPrivs, "", want("NoNewPrivs", "1"), "set")
	add(CheckSeccomp, "", want("Seccomp", "2"), "a filter is in force")
	uid := os.Getuid()
	var uidErr error
	if uid == 0 {
		uidErr = errors.New("uid 0: an inner bwrap fails as root, and files belong to root")
	}
	add(CheckUID, "", uidErr, "uid "+strconv.Itoa(uid))
	if req.Nested {
		out, err := nested(ctx)
		add(CheckNested, "", err, out)
	}
	return rep
}

// unreachable says why p cannot be had, or with an error that it can. The way by
// pid 1's root is tried as well.
func unreachable(p string) (string, error) {
	var why string
	for _, way := range []string{p, "/proc/1/root" + p} {
		fi, err := os.Stat(way)
		if err != nil {
			if why == "" {
				why = err.Error()
			}
			continue
		}
		if fi.IsDir() {
			entries, err := os.ReadDir(way)
			if err == nil && len(entries) > 0 {
				return "", fmt.Errorf("%s is a directory with %d entries", way, len(entries))
			}
			why = "an empty directory covers it"
			continue
		}
		if !fi.Mode().IsRegular() {
			return "", fmt.Errorf("%s is there: %s", way, fi.Mode())
		}
		b, err := readSome(way)
		if err == nil && len(b) > 0 {
			return "", fmt.Errorf("%s can be read", way)
		}
		why = "an empty file covers it"
	}
	return why, nil
}

func readable(p string) error {
	fi, err := os.Stat(p)
	if err != nil {
		return err
	}
	if fi.IsDir() {
		entries, err := os.ReadDir(p)
		if err == nil && len(entries) == 0 {
			err = errors.New("the directory is empty")
		}
		return err
	}
	b, err := readSome(p)
	if err == nil && len(b) == 0 {
		err = errors.New("the file is empty")
	}
	return err
}

func readSome(p string) ([]byte, error) {
	// Non-blocking: a path may turn out to be a pipe that nobody writes.
	f, err := os.OpenFile(p, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, 4096))
}

// mostProcesses is far more than a boundary holds when the probe looks, and far
// fewer than a host runs (kernel threads alone are more).
const mostProcesses = 24

// procIsFresh: /proc is of this pid namespace, which is the sandbox's own.
func procIsFresh() (string, error) {
	s, err := status("self")
	if err != nil {
		return "", err
	}
	if s["Pid"] != strconv.Itoa(os.Getpid()) {
		return "", fmt.Errorf("it is another pid namespace's: it calls this process %s, the kernel %d", s["Pid"], os.Getpid())
	}
	one, err := status("1")
	if err != nil {
		return "", fmt.Errorf("pid 1: %w", err)
	}
	if mine := strings.Fields(s["Uid"]); len(mine) == 0 || one["Uid"] != s["Uid"] {
		return "", fmt.Errorf("pid 1 (%s) is another user's: the host's, not the sandbox's", one["Name"])
	}
	all, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return "", err
	}
	if len(all) > mostProcesses {
		return "", fmt.Errorf("%d processes are visible, at most %d belong here", len(all), mostProcesses)
	}
	return fmt.Sprintf("pid 1 is %s, %d processes", one["Name"], len(all)), nil
}

// Inner tells why a runtime's own sandbox cannot start where this is called, or nil.
func Inner(ctx context.Context) error {
	_, err := nested(ctx)
	return err
}

// nested starts an inner bwrap as the runtimes do: a user namespace and a /proc of its own.
func nested(ctx context.Context) (string, error) {
	bwrap, err := exec.LookPath("bwrap")
	if err != nil {
		return "", errors.New("bwrap is not in the PATH inside")
	}
	out, err := run(ctx, "/", bwrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc",
		"--", "/bin/sh", "-c", "read -r pid rest </proc/self/stat && echo $pid")
	if err != nil {
		return "", err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(out))
	if err != nil || pid > mostProcesses {
		return "", fmt.Errorf("it ran, and its /proc is not its own: %q", firstLine(out))
	}
	return "an inner bwrap runs, with a fresh /proc", nil
}
