//go:build !linux

package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/listeners"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

// Process is a started program, without a boundary: this system has none.
type Process struct {
	PID  int
	Plan *sandbox.Plan
	// Network and Inside are nil: there is no sandbox.
	Network *listeners.Set
	Inside  *Inside

	done chan struct{}
	end  End
}

// Done is closed when the program has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// End says how the program ended; valid after Done.
func (p *Process) End() End { return p.end }

// Init is 0: there is no sandbox.
func (p *Process) Init(context.Context) int { return 0 }

// SetUp is 0: there is no sandbox.
func (p *Process) SetUp(context.Context) int { return 0 }

func (s *Start) once(ctx context.Context) (*Process, error) {
	if s.Compile != nil {
		return nil, &UnavailableError{Err: errors.New("there is no sandbox on " + runtime.GOOS)}
	}
	cmd := &exec.Cmd{
		Path: s.Argv[0], Args: s.Argv, Env: append([]string{}, s.Env...), Dir: s.Dir,
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true},
	}
	if s.Stdin != nil {
		cmd.Stdin = s.Stdin
	}
	if s.Stdout != nil {
		cmd.Stdout = s.Stdout
	}
	if s.Stderr != nil {
		cmd.Stderr = s.Stderr
	}
	if s.Pass != nil {
		return nil, errors.New("a terminal for an agent needs Linux")
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &Process{PID: cmd.Process.Pid, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		err := cmd.Wait()
		ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
		switch {
		case !ok:
			p.end = End{Code: -1, Text: fmt.Sprint(err)}
		case ws.Signaled():
			p.end = End{Code: 128 + int(ws.Signal()), Signal: int(ws.Signal()), Text: "killed by signal " + ws.Signal().String()}
		default:
			p.end = End{Code: ws.ExitStatus(), Text: fmt.Sprintf("exit status %d", ws.ExitStatus())}
		}
	}()
	if s.Place != nil {
		if err := s.Place(ctx, p.PID); err != nil {
			p.Kill()
			return nil, err
		}
	}
	return p, nil
}

// Signal sends a signal to the program's process group.
func (p *Process) Signal(sig syscall.Signal) {
	select {
	case <-p.done:
	default:
		_ = syscall.Kill(-p.PID, sig)
	}
}

// Stop ends the program: it waits for grace, sends SIGTERM, waits killGrace, kills.
func (p *Process) Stop(ctx context.Context, grace, killGrace time.Duration) {
	p.StopWith(ctx, grace, killGrace, p.Signal)
}

// StopWith is Stop with another way to signal all that belongs to the program.
func (p *Process) StopWith(ctx context.Context, grace, killGrace time.Duration, signal func(syscall.Signal)) {
	for _, step := range []struct {
		wait time.Duration
		sig  syscall.Signal
	}{{grace, syscall.SIGTERM}, {killGrace, syscall.SIGKILL}} {
		timer := time.NewTimer(step.wait)
		select {
		case <-p.done:
			timer.Stop()
			return
		case <-ctx.Done():
			timer.Stop()
		case <-timer.C:
		}
		signal(step.sig)
	}
	<-p.done
}

// Kill ends the program at once and waits for its end.
func (p *Process) Kill() {
	p.Signal(syscall.SIGKILL)
	<-p.done
}

// Sealed writes v as JSON into an unlinked file, open at its start.
func Sealed(name string, v any) (*os.File, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	f, err := os.CreateTemp("", "agentconnect-"+name)
	if err != nil {
		return nil, err
	}
	defer os.Remove(f.Name())
	if _, err := f.Write(b); err != nil {
		f.Close()
		return nil, err
	}
	if _, err := f.Seek(0, 0); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Halt is not available on this system.
func (p *Process) Halt() error { return errors.ErrUnsupported }

// Resume is not available on this system.
func (p *Process) Resume() error { return errors.ErrUnsupported }

// AskBwrap knows nothing: there is no bubblewrap on this system.
func AskBwrap(context.Context, string, wire.BwrapIs) wire.BwrapIs { return wire.BwrapIs{} }

// Ahead is a launcher that was begun before its start: there is none on this system.
type Ahead struct{}

// Begin is an error: there is no sandbox.
func (s *Start) Begin() (*Ahead, error) {
	return nil, &UnavailableError{Err: errors.New("there is no sandbox on " + runtime.GOOS)}
}

// Drop does nothing.
func (a *Ahead) Drop() {}
