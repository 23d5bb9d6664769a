// The terminal of `agent shell`: made inside, its master handed out.

package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/selftest"
)

// pty returns only with an error; otherwise the process becomes the command.
func pty(args []string, stderr io.Writer) error {
	fs := flag.NewFlagSet("pty", flag.ContinueOnError)
	fs.SetOutput(stderr)
	rows := fs.Uint("rows", fromEnv("LINES"), "height in `characters`")
	cols := fs.Uint("cols", fromEnv("COLUMNS"), "width in `characters`")
	if err := fs.Parse(args); err != nil {
		return &exitError{exitUsage, nil} // flag has said it
	}
	rest := fs.Args()
	if len(rest) < 3 || rest[1] != "--" {
		return usage("pty: usage: pty [--rows N] [--cols N] FD -- CMD…")
	}
	fd, err := strconv.Atoi(rest[0])
	if err != nil || fd <= 2 {
		return usage("pty: %q is no descriptor above 2", rest[0])
	}
	if *rows > 0xffff || *cols > 0xffff {
		return usage("pty: %d rows, %d columns: at most 65535", *rows, *cols)
	}
	unix.CloseOnExec(fd)
	command := rest[2:]
	path, err := lookup(command[0])
	if err != nil {
		return err
	}

	master, slave, err := selftest.OpenTerminal(uint16(*rows), uint16(*cols))
	if errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("pty: %w: the terminals of this machine are all taken; end what holds them, or raise kernel.pty.max with sysctl", err)
	}
	if err != nil {
		return fmt.Errorf("pty: %w", err)
	}
	if err := unix.Sendmsg(fd, []byte{0}, unix.UnixRights(int(master.Fd())), nil, 0); err != nil {
		return fmt.Errorf("pty: send the terminal over descriptor %d: %w", fd, err)
	}
	// Only the receiver holds the master now: when it closes it, the session hangs up.
	if err := errors.Join(unix.Close(fd), master.Close()); err != nil {
		return fmt.Errorf("pty: %w", err)
	}

	if _, err := unix.Setsid(); err != nil {
		// The leader of a process group cannot leave its session; a child can.
		return asChild(path, command, slave)
	}
	if err := unix.IoctlSetInt(int(slave.Fd()), unix.TIOCSCTTY, 0); err != nil {
		return fmt.Errorf("pty: take the terminal: %w", err)
	}
	for n := range 3 {
		if err := unix.Dup3(int(slave.Fd()), n, 0); err != nil {
			return fmt.Errorf("pty: descriptor %d: %w", n, err)
		}
	}
	err = unix.Exec(path, command, os.Environ())
	return &exitError{exitCannotExec, fmt.Errorf("pty: %s: %w", path, err)}
}

// asChild runs the command in a child that leads the new session, and ends as it does.
func asChild(path string, command []string, slave *os.File) error {
	cmd := &exec.Cmd{Path: path, Args: command, Stdin: slave, Stdout: slave, Stderr: slave,
		SysProcAttr: &syscall.SysProcAttr{Setsid: true, Setctty: true}}
	if err := cmd.Start(); err != nil {
		return &exitError{exitCannotExec, fmt.Errorf("pty: %w", err)}
	}
	slave.Close()
	err := cmd.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return err
	}
	code := exit.ExitCode()
	if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		code = 128 + int(ws.Signal())
	}
	return &exitError{code, nil}
}

// fromEnv reads a number; what is none counts as not given.
func fromEnv(name string) uint {
	n, err := strconv.ParseUint(os.Getenv(name), 10, 16)
	if err != nil {
		return 0
	}
	return uint(n)
}
