package rest

import (
	"bufio"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func processorTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // cannot fail
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// ours is looked up each time: a debugger or a probe (uprobes) may have written since.
func ours() []pages {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil
	}
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return nil
	}
	defer f.Close()
	return programPages(f, exe)
}

func shed() {
	for _, p := range ours() {
		drop(p)
	}
}

func drop(p pages) {
	// By number, since no Go object lies there.
	_, _, _ = unix.Syscall(unix.SYS_MADVISE, p.from, p.to-p.from, unix.MADV_DONTNEED)
}

// pages is where a mapping lies.
type pages struct{ from, to uintptr }

// programPages reads smaps (proc_pid_smaps(5)) for the mappings of the file exe that hold what
// stands in it and no more: what was ever written to, as by relocations, is lost when dropped.
// Such pages are anonymous while they are in memory, and counted as swapped when they are not.
func programPages(smaps io.Reader, exe string) (found []pages) {
	var p pages        // of the mapping that is read, if it may be one
	var unwritten bool // none of it is anonymous
	for in := bufio.NewScanner(smaps); in.Scan(); {
		words := strings.Fields(in.Text())
		switch {
		case len(words) == 3 && words[0] == "Anonymous:":
			unwritten = words[1] == "0"
		case len(words) == 3 && words[0] == "Swap:": // after Anonymous
			if p != (pages{}) && unwritten && words[1] == "0" {
				found = append(found, p)
			}
			p = pages{}
		case len(words) >= 5 && strings.Contains(words[0], "-"): // FROM-TO PERMISSIONS OFFSET DEVICE INODE [PATH]
			p, unwritten = pages{}, false
			from, to, _ := strings.Cut(words[0], "-")
			a, err := strconv.ParseUint(from, 16, 64)
			b, berr := strconv.ParseUint(to, 16, 64)
			if err == nil && berr == nil && a < b && (words[1] == "r-xp" || words[1] == "r--p") && strings.HasSuffix(in.Text(), " "+exe) {
				p = pages{uintptr(a), uintptr(b)}
			}
		}
	}
	return found
}
