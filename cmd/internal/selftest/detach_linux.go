package selftest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// LingerFor is how long a forked process stays at most, so that a test which
// forgets it leaves nothing for ever.
const LingerFor = 10 * time.Minute

// detach starts a process that leaves this one's session and group, and whose
// parent is gone when detach returns (a daemon's double fork). It returns its pid.
func detach(tag string) (int, error) {
	cmd := exec.CommandContext(context.Background(), "/proc/self/exe", "detach", tag)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return 0, fmt.Errorf("%w: %s", err, firstLine(stderr.String()))
	}
	pid, err := strconv.Atoi(strings.TrimSpace(stdout.String()))
	if err != nil || pid <= 1 {
		// Whoever asked may signal it: 0 and below would mean a group, or everybody.
		return 0, fmt.Errorf("%q is no process", firstLine(stdout.String()))
	}
	return pid, nil
}

// Detach is the process between (agentconnect-guest detach TAG): it starts
// `linger TAG` in yet another session and returns its pid without waiting.
func Detach(tag string) (int, error) {
	cmd := exec.CommandContext(context.Background(), "/proc/self/exe", "linger", tag)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	pid := cmd.Process.Pid // Release sets it to -1, which to kill(2) means everybody
	return pid, cmd.Process.Release()
}

// Linger is the process that stays (agentconnect-guest linger TAG).
func Linger(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(LingerFor):
	}
}

// dieOf ends this process by the signal itself. Go catches some signals for its own
// report, so a shell takes this process's place and dies of it.
func dieOf(name string) error {
	sig := strings.TrimPrefix(strings.ToUpper(name), "SIG")
	for _, c := range sig {
		if (c < 'A' || c > 'Z') && (c < '0' || c > '9') {
			return fmt.Errorf("%q is no signal", name)
		}
	}
	if sig == "" {
		return errors.New("which signal?")
	}
	return syscall.Exec("/bin/sh", []string{"sh", "-c", "kill -" + sig + " $$; exit 125"}, os.Environ())
}
