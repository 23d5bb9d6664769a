//go:build linux && (amd64 || arm64)

// The number tables, compared with golang.org/x/sys for the architecture the test
// runs on. CI runs it on both.

package seccomp

import (
	"maps"
	"runtime"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestNumbersAreThoseOfTheKernelHeaders(t *testing.T) {
	want := map[string]uint32{
		"acct":                    unix.SYS_ACCT,
		"add_key":                 unix.SYS_ADD_KEY,
		"adjtimex":                unix.SYS_ADJTIMEX,
		"bpf":                     unix.SYS_BPF,
		"capset":                  unix.SYS_CAPSET,
		"chroot":                  unix.SYS_CHROOT,
		"clock_adjtime":           unix.SYS_CLOCK_ADJTIME,
		"clock_settime":           unix.SYS_CLOCK_SETTIME,
		"clone":                   unix.SYS_CLONE,
		"clone3":                  unix.SYS_CLONE3,
		"delete_module":           unix.SYS_DELETE_MODULE,
		"eventfd2":                unix.SYS_EVENTFD2,
		"fanotify_init":           unix.SYS_FANOTIFY_INIT,
		"fcntl":                   unix.SYS_FCNTL,
		"finit_module":            unix.SYS_FINIT_MODULE,
		"fsconfig":                unix.SYS_FSCONFIG,
		"fsmount":                 unix.SYS_FSMOUNT,
		"fsopen":                  unix.SYS_FSOPEN,
		"fspick":                  unix.SYS_FSPICK,
		"get_mempolicy":           unix.SYS_GET_MEMPOLICY,
		"init_module":             unix.SYS_INIT_MODULE,
		"io_uring_enter":          unix.SYS_IO_URING_ENTER,
		"io_uring_register":       unix.SYS_IO_URING_REGISTER,
		"io_uring_setup":          unix.SYS_IO_URING_SETUP,
		"ioctl":                   unix.SYS_IOCTL,
		"kcmp":                    unix.SYS_KCMP,
		"kexec_file_load":         unix.SYS_KEXEC_FILE_LOAD,
		"kexec_load":              unix.SYS_KEXEC_LOAD,
		"keyctl":                  unix.SYS_KEYCTL,
		"landlock_create_ruleset": unix.SYS_LANDLOCK_CREATE_RULESET,
		"listmount":               unix.SYS_LISTMOUNT,
		"lookup_dcookie":          unix.SYS_LOOKUP_DCOOKIE,
		"mbind":                   unix.SYS_MBIND,
		"memfd_create":            unix.SYS_MEMFD_CREATE,
		"migrate_pages":           unix.SYS_MIGRATE_PAGES,
		"mount":                   unix.SYS_MOUNT,
		"mount_setattr":           unix.SYS_MOUNT_SETATTR,
		"move_mount":              unix.SYS_MOVE_MOUNT,
		"move_pages":              unix.SYS_MOVE_PAGES,
		"name_to_handle_at":       unix.SYS_NAME_TO_HANDLE_AT,
		"nfsservctl":              unix.SYS_NFSSERVCTL,
		"open_by_handle_at":       unix.SYS_OPEN_BY_HANDLE_AT,
		"open_tree":               unix.SYS_OPEN_TREE,
		"open_tree_attr":          unix.SYS_OPEN_TREE_ATTR,
		"openat2":                 unix.SYS_OPENAT2,
		"perf_event_open":         unix.SYS_PERF_EVENT_OPEN,
		"personality":             unix.SYS_PERSONALITY,
		"pidfd_getfd":             unix.SYS_PIDFD_GETFD,
		"pidfd_open":              unix.SYS_PIDFD_OPEN,
		"pivot_root":              unix.SYS_PIVOT_ROOT,
		"prctl":                   unix.SYS_PRCTL,
		"process_vm_readv":        unix.SYS_PROCESS_VM_READV,
		"process_vm_writev":       unix.SYS_PROCESS_VM_WRITEV,
		"ptrace":                  unix.SYS_PTRACE,
		"quotactl":                unix.SYS_QUOTACTL,
		"quotactl_fd":             unix.SYS_QUOTACTL_FD,
		"reboot":                  unix.SYS_REBOOT,
		"request_key":             unix.SYS_REQUEST_KEY,
		"seccomp":                 unix.SYS_SECCOMP,
		"set_mempolicy":           unix.SYS_SET_MEMPOLICY,
		"setns":                   unix.SYS_SETNS,
		"setsid":                  unix.SYS_SETSID,
		"setsockopt":              unix.SYS_SETSOCKOPT,
		"settimeofday":            unix.SYS_SETTIMEOFDAY,
		"signalfd4":               unix.SYS_SIGNALFD4,
		"socket":                  unix.SYS_SOCKET,
		"socketpair":              unix.SYS_SOCKETPAIR,
		"statmount":               unix.SYS_STATMOUNT,
		"swapoff":                 unix.SYS_SWAPOFF,
		"swapon":                  unix.SYS_SWAPON,
		"syslog":                  unix.SYS_SYSLOG,
		"timer_create":            unix.SYS_TIMER_CREATE,
		"umount2":                 unix.SYS_UMOUNT2,
		"unshare":                 unix.SYS_UNSHARE,
		"userfaultfd":             unix.SYS_USERFAULTFD,
		"vhangup":                 unix.SYS_VHANGUP,
		"fchmod":                  unix.SYS_FCHMOD,
		"fchmodat":                unix.SYS_FCHMODAT,
		"fchmodat2":               unix.SYS_FCHMODAT2,
		"openat":                  unix.SYS_OPENAT,
		"mknodat":                 unix.SYS_MKNODAT,
	}
	maps.Copy(want, onlyHere)
	if d := cmp.Diff(want, abis[runtime.GOARCH].calls); d != "" {
		t.Errorf("numbers of %s (-headers +table):\n%s", runtime.GOARCH, d)
	}
	if got := uint32(unix.SYS_RSEQ_SLICE_YIELD); got != newest {
		t.Errorf("newest reviewed call is %d, the headers say %d", newest, got)
	}
}
