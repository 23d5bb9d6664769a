package wire

import (
	"strings"
	"testing"
)

// FuzzReady: what the launcher may say; nothing else passes for its word.
func FuzzReady(f *testing.F) {
	for _, s := range []string{"", "ready", "ready \n", "ready rrutUN \n", "ready ptu no nft here\n", "ready  a\n\n", "steady r w\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, word []byte) {
		kinds, weaker, done := ParseReady(word)
		if !done {
			return
		}
		if strings.ContainsAny(kinds, " ") {
			t.Fatalf("kinds %q", kinds)
		}
		if again := Ready(kinds, weaker); !strings.Contains(string(word[:len(word)-1]), "\n") && string(again) != string(word) {
			t.Fatalf("%q was read as %q, which is said %q", word, kinds, again)
		}
	})
}

// Both who say it are understood: a launcher, and one that fills the number in.
func TestJoinedIsReadHoweverItWasMade(t *testing.T) {
	for _, pid := range []int{2, 17, 4194304, 1<<31 - 1} {
		line := JoinedLine()
		for i, n := JoinedSize-2, pid; n > 0; i-- {
			line[i], n = byte('0'+n%10), n/10
		}
		for _, said := range []string{string(line[:]), string(Joined(pid))} {
			if got := ParseJoined(said); got != pid {
				t.Errorf("%q is read as %d, want %d", said, got, pid)
			}
		}
	}
}

// FuzzJoined: a process that is signalled later is one that was named, and never a group,
// everybody, or the first.
func FuzzJoined(f *testing.F) {
	for _, s := range []string{"", "pid 0000000017\n", "pid 17\n", "pid 0000000001\n", "pid -000000001\n", "pid 0\n", "pid +5\n", "pid 99999999999999999999\n", "pid 5", "pid 5\n\n", "launch 5\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		pid := ParseJoined(line)
		if pid == 0 {
			return
		}
		if pid <= 1 {
			t.Fatalf("%q is %d", line, pid)
		}
		if strings.TrimSuffix(string(Joined(pid)), "\n") != strings.TrimSuffix(line, "\n") {
			t.Fatalf("%q is read as %d", line, pid)
		}
	})
}
