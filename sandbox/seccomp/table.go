// The table: every system call the boundary refuses, the answer, and the reason;
// and the calls that look refusable and are left open, with the reason. A review
// of the filter is a review of this file.

package seccomp

// Answers, as numbers: the file means Linux wherever it is compiled.
const (
	ePERM            = 1
	eNOSYS           = 38
	eNOPROTOOPT      = 92
	ePROTONOSUPPORT  = 93
	eAFNOSUPPORT     = 97
	foreignABI       = retKillProcess
	unknownCall      = eNOSYS
	newest           = 471 // rseq_slice_yield, Linux 7.0
	auditArchX8664   = 0xc000003e
	auditArchAarch64 = 0xc00000b7
)

// About the three answers above that stand for no single call:
//
// foreignABI: a call through another architecture's entry (int 0x80 on amd64, a
// 32-bit program on either) kills the process with SIGSYS. Every number means
// something else there, so no row below would hold. An errno would fail closed as
// well, but a 32-bit program cannot even report it or exit: write and exit are
// refused too, and it ends in a random fault. SIGSYS says "bad system call" to
// whoever started it. Only the process that made the call dies.
//
// unknownCall: numbers above the newest reviewed call answer ENOSYS, as an older
// kernel would, which every libc copes with. So the next io_uring is closed until
// somebody has looked at it. x32 numbers (bit 30 on amd64) lie there as well, and
// ENOSYS is what a kernel without x32 answers.

// op compares the low 32 bits of an argument. The kernel takes the arguments in
// question as int or unsigned int and drops the rest, so a 64-bit compare is passed
// by with any high bit set (TIOCSTI|1<<32: CVE-2019-10063).
type op int

const (
	oneOf  op = iota // equal to one of the values
	noneOf           // equal to none of them
	anyBit           // has a bit of one of them
)

type cond struct {
	arg    uint32
	op     op
	values []uint32
}

// row refuses one call with errno where all conditions hold; without a condition, always.
type row struct {
	call     string
	errno    uint16
	when     []cond
	unnested bool // only where nesting is off
	halted   bool // only where a sandbox is halted by signals
	why      string
}

// in reports whether the row is in a variant of the filter.
func (r row) in(o Options) bool { return !(r.unnested && o.Nesting) && (!r.halted || o.Signals) }

const (
	tioCSTI     = 0x5412
	tioCLINUX   = 0x541c
	tioCSETD    = 0x5423
	afUnspec    = 0
	afUnix      = 1
	afInet      = 2
	afInet6     = 10
	afNetlink   = 16
	nlXFRM      = 6
	nlNetfilter = 12
	protoIP     = 0
	protoDCCP   = 33
	protoIPv6   = 41
	protoL2TP   = 115
	protoSCTP   = 132
	protoSMC    = 256
	setReplace  = 64 // IPT_SO_SET_REPLACE, IP6T_SO_SET_REPLACE
	newUser     = 0x10000000
	fSetSig     = 10
	sigKill     = 9
	sigCont     = 18
	setID       = 0o6000   // S_ISUID, S_ISGID
	ifDevice    = 0o20000  // the bit that S_IFCHR and S_IFBLK have and no other kind
	oCreat      = 0x40     // O_CREAT
	oTmpfile    = 0x400000 // __O_TMPFILE
)

var families = []uint32{afUnspec, afUnix, afInet, afInet6, afNetlink}

// table is read from top to bottom: of several rows for one call the first that fits decides.
var table = []row{
	// Terminals.
	{call: "ioctl", errno: ePERM, when: []cond{{1, oneOf, []uint32{tioCSTI}}}, why: "puts keystrokes into the terminal: the operator's shell would run them"},
	{call: "ioctl", errno: ePERM, when: []cond{{1, oneOf, []uint32{tioCLINUX}}}, why: "pastes into a virtual console: the same by another door (CVE-2023-28100)"},
	{call: "ioctl", errno: ePERM, when: []cond{{1, oneOf, []uint32{tioCSETD}}}, why: "loads line disciplines nobody needs here; n_gsm and n_hdlc gave root (CVE-2023-6546, CVE-2017-2636)"},

	// Second ways to make calls.
	{call: "io_uring_setup", errno: eNOSYS, why: "a ring opens sockets and files without a system call that a filter sees; ENOSYS makes libuv and others fall back"},
	{call: "io_uring_enter", errno: eNOSYS, why: "the same, for a ring that came in over a socket"},
	{call: "io_uring_register", errno: eNOSYS, why: "the same"},

	// Families and protocols: an allowlist, since opening a socket loads the module behind it.
	{call: "socket", errno: eAFNOSUPPORT, when: []cond{{0, noneOf, families}}, why: "AF_VSOCK reaches the hypervisor past the network namespace; AF_PACKET, AF_ALG, AF_XDP, AF_KEY, AF_TIPC, AF_RDS, AF_CAN, AF_BLUETOOTH and the rest are where local root holes live"},
	{call: "socketpair", errno: eAFNOSUPPORT, when: []cond{{0, noneOf, families}}, why: "loads the same modules (AF_TIPC has pairs)"},
	{call: "socket", errno: ePROTONOSUPPORT, when: []cond{{0, oneOf, []uint32{afInet, afInet6}}, {2, oneOf, []uint32{protoDCCP, protoL2TP, protoSCTP, protoSMC}}}, why: "modules with a record (CVE-2017-6074 in DCCP), loaded by any user; SMC is AF_SMC by another name. MPTCP stays: Go's listeners ask for it"},
	{call: "socket", errno: ePROTONOSUPPORT, when: []cond{{0, oneOf, []uint32{afNetlink}}, {2, oneOf, []uint32{nlXFRM, nlNetfilter}}}, why: "nf_tables and xfrm configuration, which a user namespace inside would open: the most used way from there to root. Routes, links and socket lists stay"},
	{call: "setsockopt", errno: eNOPROTOOPT, when: []cond{{1, oneOf, []uint32{protoIP, protoIPv6}}, {2, oneOf, []uint32{setReplace}}}, why: "the old door to the same tables (CVE-2021-22555)"},

	// Keyrings belong to the user, not to a namespace.
	{call: "keyctl", errno: eNOSYS, why: "the user's keyrings, with the host's Kerberos and disk keys, are shared with the boundary; ENOSYS is a kernel without keyrings, which callers know"},
	{call: "add_key", errno: eNOSYS, why: "the same"},
	{call: "request_key", errno: eNOSYS, why: "the same; may start /sbin/request-key on the host"},

	// Kernel interfaces with a large surface and no use for an agent.
	{call: "bpf", errno: ePERM, why: "programs in the kernel; EPERM as with kernel.unprivileged_bpf_disabled"},
	{call: "perf_event_open", errno: ePERM, why: "measures other processes and the kernel; a long record of holes"},
	{call: "userfaultfd", errno: ePERM, why: "stops the kernel in the middle of a copy, which makes its races winnable"},
	{call: "modify_ldt", errno: eNOSYS, why: "16-bit segments; of use to 32-bit programs only, which are refused anyway"},
	{call: "uselib", errno: eNOSYS, why: "a.out libraries: dead code with a hole (CVE-2004-1235)"},
	{call: "lookup_dcookie", errno: eNOSYS, why: "profiler's view of other processes' files; gone since Linux 6.7"},
	{call: "nfsservctl", errno: eNOSYS, why: "gone since Linux 3.1"},
	{call: "move_pages", errno: eNOSYS, why: "tells which physical node holds a page, also of other processes; ENOSYS is a kernel without NUMA. mbind and set_mempolicy stay for databases and JVMs"},
	{call: "migrate_pages", errno: eNOSYS, why: "the same"},

	// Files that keep more than their content on the host, where the view's nosuid and nodev
	// do not hold: a set-id program in a workspace is the user's for everybody to run.
	{call: "chmod", errno: ePERM, when: []cond{{1, anyBit, []uint32{setID}}}, why: "set-user-id and set-group-id programs outlive the agent in the workspace"},
	{call: "fchmod", errno: ePERM, when: []cond{{1, anyBit, []uint32{setID}}}, why: "the same"},
	{call: "fchmodat", errno: ePERM, when: []cond{{2, anyBit, []uint32{setID}}}, why: "the same"},
	{call: "fchmodat2", errno: ePERM, when: []cond{{2, anyBit, []uint32{setID}}}, why: "the same"},
	{call: "creat", errno: ePERM, when: []cond{{1, anyBit, []uint32{setID}}}, why: "the same, at once"},
	{call: "open", errno: ePERM, when: []cond{{1, anyBit, []uint32{oCreat, oTmpfile}}, {2, anyBit, []uint32{setID}}}, why: "the same; without O_CREAT or O_TMPFILE the third argument is not there"},
	{call: "openat", errno: ePERM, when: []cond{{2, anyBit, []uint32{oCreat, oTmpfile}}, {3, anyBit, []uint32{setID}}}, why: "the same"},
	{call: "openat2", errno: eNOSYS, unnested: true, why: "its mode lies in memory, which a filter cannot read; callers fall back to openat as on Linux before 5.6. bubblewrap 0.11 does not: with nesting on the call is there, and so is this way to make a set-id file"},
	{call: "mknod", errno: ePERM, when: []cond{{1, anyBit, []uint32{setID, ifDevice}}}, why: "the same, and devices: the kernel lets anybody make a 0:0 one, which overlay file systems take for a hole"},
	{call: "mknodat", errno: ePERM, when: []cond{{2, anyBit, []uint32{setID, ifDevice}}}, why: "the same"},

	// Files by another name than their path.
	{call: "open_by_handle_at", errno: ePERM, why: "opens any file of a mounted file system by number, past every mount of ours; newer kernels let the root of a user namespace do so"},

	// The mount calls of Linux 5.2 and later. mount(2) stays for an inner sandbox, and
	// callers fall back to it on ENOSYS.
	{call: "open_tree", errno: eNOSYS, why: "copies mounts to descriptors that outlive the view they came from; flatpak was passed by with it (CVE-2021-41133)"},
	{call: "open_tree_attr", errno: eNOSYS, why: "the same, with flags changed in one step"},
	{call: "move_mount", errno: eNOSYS, why: "the same family"},
	{call: "fsopen", errno: eNOSYS, why: "the same family; its option parser gave root from a user namespace (CVE-2022-0185)"},
	{call: "fsconfig", errno: eNOSYS, why: "the same"},
	{call: "fsmount", errno: eNOSYS, why: "the same"},
	{call: "fspick", errno: eNOSYS, why: "the same"},
	{call: "mount_setattr", errno: eNOSYS, why: "the same family: changes a whole tree of read-only flags, or maps its owners"},

	// The machine. The kernel asks for capabilities that no process inside has; the
	// filter says it once more, before any code of theirs runs.
	{call: "kexec_load", errno: ePERM, why: "replaces the kernel"},
	{call: "kexec_file_load", errno: ePERM, why: "replaces the kernel"},
	{call: "init_module", errno: ePERM, why: "loads code into the kernel"},
	{call: "finit_module", errno: ePERM, why: "loads code into the kernel"},
	{call: "delete_module", errno: ePERM, why: "takes code out of the kernel"},
	{call: "reboot", errno: ePERM, why: "stops the machine"},
	{call: "swapon", errno: ePERM, why: "the machine's memory"},
	{call: "swapoff", errno: ePERM, why: "the machine's memory"},
	{call: "clock_settime", errno: ePERM, why: "the machine's clock"},
	{call: "settimeofday", errno: ePERM, why: "the machine's clock"},
	{call: "adjtimex", errno: ePERM, why: "the machine's clock; reading and setting differ behind a pointer, which a filter cannot follow, and only clock daemons read it"},
	{call: "clock_adjtime", errno: ePERM, why: "the same; ntp_gettime fails with it"},
	{call: "acct", errno: ePERM, why: "writes a record of every process to a file of the caller's choice"},
	{call: "quotactl", errno: ePERM, why: "the file systems' quotas"},
	{call: "quotactl_fd", errno: ePERM, why: "the same"},
	{call: "vhangup", errno: ePERM, why: "hangs up the terminal for everybody on it"},
	{call: "iopl", errno: ePERM, why: "the machine's I/O ports"},
	{call: "ioperm", errno: ePERM, why: "the machine's I/O ports"},
	{call: "syslog", errno: ePERM, why: "the kernel's log: addresses, devices, other processes' names; readable by all where dmesg_restrict is 0"},

	// User namespaces, where nesting is off: in one, a process can take a mount that
	// holds a seal out of its own sight and rename what lies below.
	{call: "clone", errno: ePERM, unnested: true, when: []cond{{0, anyBit, []uint32{newUser}}}, why: "no user namespaces; EPERM as on a host that forbids them"},
	{call: "unshare", errno: ePERM, unnested: true, when: []cond{{0, anyBit, []uint32{newUser}}}, why: "the same"},
	{call: "setns", errno: ePERM, unnested: true, when: []cond{{1, oneOf, []uint32{0}}}, why: "0 joins whatever the descriptor is"},
	{call: "setns", errno: ePERM, unnested: true, when: []cond{{1, anyBit, []uint32{newUser}}}, why: "joins one that somebody else made"},
	{call: "clone3", errno: eNOSYS, unnested: true, why: "its flags lie behind a pointer; on ENOSYS every libc takes clone, on EPERM none starts a thread"},

	// Signals that the kernel sends by itself: where no control group halts a sandbox, SIGSTOP
	// does, and SIGCONT is what ends that, whoever sends it. Nobody inside can, halted.
	{call: "timer_create", errno: eNOSYS, halted: true, why: "a timer that sends SIGCONT lets a halted process go on; its signal lies behind a pointer. On ENOSYS timeout takes alarm and Go setitimer, whose signals wake nobody"},
	{call: "fcntl", errno: ePERM, halted: true, when: []cond{{1, oneOf, []uint32{fSetSig}}, {2, oneOf, []uint32{sigKill, sigCont}}}, why: "the same by what the host does to a watched folder, a lease or a pipe; the death of one process has the kernel send SIGCONT to others"},
}

// leftOpen are calls that a reader may look for above: open on purpose.
var leftOpen = []struct{ call, why string }{
	{"ptrace", "debuggers; pid 1 of the boundary has this filter as well, so there is nothing to gain by it"},
	{"process_vm_readv", "debuggers; the pid namespace bounds it"},
	{"process_vm_writev", "the same"},
	{"pidfd_open", "the same"},
	{"pidfd_getfd", "the same"},
	{"kcmp", "the same; Mesa and rr use it"},
	{"personality", "gdb switches address randomisation off with it; it changes the caller alone and is reset by a setuid program"},
	{"name_to_handle_at", "a handle is of no use without open_by_handle_at; systemd and coreutils compare mounts by it"},
	{"seccomp", "an inner sandbox narrows further, never wider"},
	{"prctl", "an inner bwrap and every runtime"},
	{"mount", "an inner bwrap; without a namespace of its own the kernel refuses"},
	{"umount2", "the same"},
	{"pivot_root", "the same"},
	{"chroot", "the same"},
	{"capset", "the same"},
	{"setsid", "the same, and every shell"},
	{"eventfd2", "the same, and every event loop"},
	{"signalfd4", "the same"},
	{"mbind", "databases, JVMs"},
	{"set_mempolicy", "databases, JVMs"},
	{"get_mempolicy", "databases, JVMs"},
	{"fanotify_init", "file watchers; unprivileged use sees only what the caller could open"},
	{"memfd_create", "every JIT compiler; nothing inside forbids running code, so nothing is gained"},
	{"statmount", "shows the caller's own mounts, as /proc/self/mountinfo does"},
	{"listmount", "the same"},
	{"landlock_create_ruleset", "an inner sandbox narrows further"},
}

// abis holds the numbers of every call named in this file. A call that an architecture
// does not have is absent.
var abis = map[string]abi{
	"amd64": {auditArchX8664, map[string]uint32{
		"acct":                    163,
		"add_key":                 248,
		"adjtimex":                159,
		"bpf":                     321,
		"capset":                  126,
		"chmod":                   90,
		"chroot":                  161,
		"clock_adjtime":           305,
		"clock_settime":           227,
		"clone":                   56,
		"clone3":                  435,
		"creat":                   85,
		"delete_module":           176,
		"eventfd2":                290,
		"fanotify_init":           300,
		"fchmod":                  91,
		"fchmodat":                268,
		"fchmodat2":               452,
		"fcntl":                   72,
		"finit_module":            313,
		"fsconfig":                431,
		"fsmount":                 432,
		"fsopen":                  430,
		"fspick":                  433,
		"get_mempolicy":           239,
		"init_module":             175,
		"io_uring_enter":          426,
		"io_uring_register":       427,
		"io_uring_setup":          425,
		"ioctl":                   16,
		"ioperm":                  173,
		"iopl":                    172,
		"kcmp":                    312,
		"kexec_file_load":         320,
		"kexec_load":              246,
		"keyctl":                  250,
		"landlock_create_ruleset": 444,
		"listmount":               458,
		"lookup_dcookie":          212,
		"mbind":                   237,
		"memfd_create":            319,
		"migrate_pages":           256,
		"mknod":                   133,
		"mknodat":                 259,
		"modify_ldt":              154,
		"mount":                   165,
		"mount_setattr":           442,
		"move_mount":              429,
		"move_pages":              279,
		"name_to_handle_at":       303,
		"nfsservctl":              180,
		"open":                    2,
		"open_by_handle_at":       304,
		"open_tree":               428,
		"open_tree_attr":          467,
		"openat":                  257,
		"openat2":                 437,
		"perf_event_open":         298,
		"personality":             135,
		"pidfd_getfd":             438,
		"pidfd_open":              434,
		"pivot_root":              155,
		"prctl":                   157,
		"process_vm_readv":        310,
		"process_vm_writev":       311,
		"ptrace":                  101,
		"quotactl":                179,
		"quotactl_fd":             443,
		"reboot":                  169,
		"request_key":             249,
		"seccomp":                 317,
		"set_mempolicy":           238,
		"setns":                   308,
		"setsid":                  112,
		"setsockopt":              54,
		"settimeofday":            164,
		"signalfd4":               289,
		"socket":                  41,
		"socketpair":              53,
		"statmount":               457,
		"swapoff":                 168,
		"swapon":                  167,
		"syslog":                  103,
		"timer_create":            222,
		"umount2":                 166,
		"unshare":                 272,
		"uselib":                  134,
		"userfaultfd":             323,
		"vhangup":                 153,
	}},
	"arm64": {auditArchAarch64, map[string]uint32{
		"acct":                    89,
		"add_key":                 217,
		"adjtimex":                171,
		"bpf":                     280,
		"capset":                  91,
		"chroot":                  51,
		"clock_adjtime":           266,
		"clock_settime":           112,
		"clone":                   220,
		"clone3":                  435,
		"delete_module":           106,
		"eventfd2":                19,
		"fanotify_init":           262,
		"fchmod":                  52,
		"fchmodat":                53,
		"fchmodat2":               452,
		"fcntl":                   25,
		"finit_module":            273,
		"fsconfig":                431,
		"fsmount":                 432,
		"fsopen":                  430,
		"fspick":                  433,
		"get_mempolicy":           236,
		"init_module":             105,
		"io_uring_enter":          426,
		"io_uring_register":       427,
		"io_uring_setup":          425,
		"ioctl":                   29,
		"kcmp":                    272,
		"kexec_file_load":         294,
		"kexec_load":              104,
		"keyctl":                  219,
		"landlock_create_ruleset": 444,
		"listmount":               458,
		"lookup_dcookie":          18,
		"mbind":                   235,
		"memfd_create":            279,
		"migrate_pages":           238,
		"mknodat":                 33,
		"mount":                   40,
		"mount_setattr":           442,
		"move_mount":              429,
		"move_pages":              239,
		"name_to_handle_at":       264,
		"nfsservctl":              42,
		"open_by_handle_at":       265,
		"open_tree":               428,
		"open_tree_attr":          467,
		"openat":                  56,
		"openat2":                 437,
		"perf_event_open":         241,
		"personality":             92,
		"pidfd_getfd":             438,
		"pidfd_open":              434,
		"pivot_root":              41,
		"prctl":                   167,
		"process_vm_readv":        270,
		"process_vm_writev":       271,
		"ptrace":                  117,
		"quotactl":                60,
		"quotactl_fd":             443,
		"reboot":                  142,
		"request_key":             218,
		"seccomp":                 277,
		"set_mempolicy":           237,
		"setns":                   268,
		"setsid":                  157,
		"setsockopt":              208,
		"settimeofday":            170,
		"signalfd4":               74,
		"socket":                  198,
		"socketpair":              199,
		"statmount":               457,
		"swapoff":                 225,
		"swapon":                  224,
		"syslog":                  116,
		"timer_create":            107,
		"umount2":                 39,
		"unshare":                 97,
		"userfaultfd":             282,
		"vhangup":                 58,
	}},
}
