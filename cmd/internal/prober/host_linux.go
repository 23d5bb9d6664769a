package prober

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// System gives uname's name and release.
func (p *Prober) System() (name, release string) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "Linux", ""
	}
	return unix.ByteSliceToString(u.Sysname[:]), unix.ByteSliceToString(u.Release[:])
}

// Syscalls asks for the newest calls that the launcher makes, with arguments that cannot
// succeed: only ENOSYS means that the kernel lacks them.
func (p *Prober) Syscalls() error {
	if _, err := unix.Openat2(-1, "", &unix.OpenHow{}); err == unix.ENOSYS {
		return errors.New("no openat2 (Linux 5.6)")
	}
	if err := unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{}); err == unix.ENOSYS {
		return errors.New("no mount_setattr (Linux 5.12)")
	}
	if _, err := unix.PidfdOpen(-1, 0); err == unix.ENOSYS {
		return errors.New("no pidfd_open (Linux 5.3)")
	}
	return nil
}

func (p *Prober) tryUserns(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, p.bwrap(), "--version")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getuid(), HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getgid(), HostID: os.Getgid(), Size: 1}},
	}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("new user namespace: %w", err)
	}
	return nil
}
