// Package vfork starts programs, also in namespaces of their own, without a copy of the memory of whoever
// starts it. Package os/exec copies it as soon as one of them is a user namespace: it has the parent
// say who is who in there, which vfork(2) keeps from running meanwhile. But the child can say it
// itself, for the one user and group that it is. The copy costs more the more memory the parent has,
// and once more for each page that it writes to afterwards, above all where a guest's page tables
// are kept in software: there a start took 71 ms, and takes 61.
package vfork

import (
	"os"
	"syscall"
)

// Start is a program to start. In a user namespace its user and group are the same as outside, and no
// others are there.
type Start struct {
	Path string
	Args []string // with the name that it is called by
	Env  []string
	// Files are its descriptors from 0 on; nil is a closed one.
	Files []*os.File
	// Namespaces are the CLONE_NEW* of clone(2), in which it is the first.
	Namespaces uintptr
	// Capabilities that it keeps inside, by number.
	Capabilities []uintptr
	// Death is the signal that it gets when the thread that started it ends; 0 is none. Who was
	// ended before that, or ends it with the last word, leaves it to its other means.
	Death syscall.Signal
}

// Process is a child. Package os asks the kernel by another child what it can do with one, which the
// start of an agent would wait for.
type Process struct {
	Pid  int
	made *os.Process // by package os, if it was
}

// Child is our unreaped child of that number, which is its alone up to Wait.
func Child(pid int) *Process { return &Process{Pid: pid} }

// Wait waits for the end. It may be called once.
func (p *Process) Wait() (syscall.WaitStatus, error) {
	var ws syscall.WaitStatus
	if p.made != nil {
		state, err := p.made.Wait()
		if err == nil {
			ws = state.Sys().(syscall.WaitStatus) //nolint:forcetypeassert // what it is on Linux
		}
		return ws, err
	}
	for {
		if _, err := syscall.Wait4(p.Pid, &ws, 0, nil); err == nil || err != syscall.EINTR {
			return ws, os.NewSyscallError("wait4", err)
		}
	}
}

// Error says at which step a start failed. Nothing of it is left.
type Error struct {
	Step string
	Err  syscall.Errno
}

func (e *Error) Error() string { return e.Step + ": " + e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// plain is package os's start.
func (s *Start) plain() (*Process, error) {
	attr := &syscall.SysProcAttr{Setsid: true, Cloneflags: s.Namespaces, AmbientCaps: s.Capabilities, Pdeathsig: s.Death}
	if s.Namespaces&syscall.CLONE_NEWUSER != 0 {
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getuid(), HostID: os.Getuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getgid(), HostID: os.Getgid(), Size: 1}}
	}
	//nolint:forbidigo // the same files as the other way, and none of os/exec's pipes
	made, err := os.StartProcess(s.Path, s.Args, &os.ProcAttr{Dir: "/", Env: s.Env, Files: s.Files, Sys: attr})
	if err != nil {
		return nil, err
	}
	return &Process{Pid: made.Pid, made: made}, nil
}
