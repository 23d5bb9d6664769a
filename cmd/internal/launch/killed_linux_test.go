package launch

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"agentconnect.md/sandbox/sandbox"
)

// parentEnv has this program be the parent of one sandbox: the policy, as JSON.
const parentEnv = "AGENTCONNECT_TEST_PARENT"

// besideEnv has the parent start its program beside another one, in whose namespaces it is let in.
const besideEnv = "AGENTCONNECT_TEST_BESIDE"

// parent starts one program behind the boundary, says its pid before it is there, and ends
// with it.
func parent() int {
	var policy sandbox.Policy
	if err := json.Unmarshal([]byte(os.Getenv(parentEnv)), &policy); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	b := &box{bin: os.Args[1], home: policy.Home, bwrap: "/usr/bin/bwrap", policy: policy}
	s := b.start(os.Args[2:]...)
	s.DieWithParent = true
	s.Place = func(_ context.Context, pid int) error {
		fmt.Println(pid)
		return nil
	}
	if os.Getenv(besideEnv) != "" {
		first, err := b.start("/bin/sh", "-c", "exec sleep 600 # "+os.Getenv(besideEnv)).Run(context.Background())
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer first.Kill()
		s.Join = first.Inside
	}
	p, err := s.Run(context.Background())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if err == nil {
		<-p.Done()
	}
	return 0
}

// tagged lists the processes that have the tag on their command line.
func tagged(t *testing.T, tag string) (pids []int) {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if text, err := os.ReadFile(name); err == nil && bytes.Contains(text, []byte(tag)) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
			if err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// Whoever of those outside is killed, and whenever, with no control group to end the rest:
// nothing is left. bubblewrap's first process waits for a word of the outer one, hears no
// SIGTERM and asks for its own parent's death signal only when it is set up.
func TestKilledAtAnyMomentLeavesNothing(t *testing.T) { killedAtAnyMoment(t, false) }

// The same for a command that is let into the namespaces of a sandbox that runs.
func TestKilledAtAnyMomentOfAJoinLeavesNothing(t *testing.T) { killedAtAnyMoment(t, true) }

func killedAtAnyMoment(t *testing.T, beside bool) {
	b := newBox(t)
	policy, err := json.Marshal(b.policy)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	rounds := 48
	if os.Getenv("AGENTCONNECT_TEST_RACES") != "" {
		rounds = 200
	}
	left, met := 0, 0
	for i := range rounds {
		tag := fmt.Sprintf("killed-%d-%d", os.Getpid(), i)
		cmd := exec.CommandContext(context.Background(), self, b.bin, "/bin/sh", "-c", "exec sleep 600 # "+tag)
		cmd.Env = append(os.Environ(), parentEnv+"="+string(policy))
		if beside {
			cmd.Env = append(cmd.Env, besideEnv+"="+tag)
		}
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		outer, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil || outer <= 1 {
			t.Fatalf("%q: %v", line, err)
		}
		// From the fork of the first process on every 200 µs, and some before it.
		if i%4 != 3 {
			for end := time.Now().Add(10 * time.Second); len(children(outer)) == 0 && time.Now().Before(end); {
			}
			if len(children(outer)) > 0 {
				met++
			}
		}
		time.Sleep(time.Duration(i/8%6) * 200 * time.Microsecond) //nolint:forbidigo // the moment is what is tried
		victim := cmd.Process.Pid
		if i%2 == 1 {
			victim = outer
		}
		signalChild(victim, syscall.SIGKILL)
		_ = cmd.Wait() // killed, or ended after its sandbox
		var pids []int
		for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) { //nolint:forbidigo // looked for with a deadline; other processes end
			if pids = tagged(t, tag); len(pids) == 0 {
				break
			}
		}
		for _, pid := range pids {
			status, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
			t.Logf("round %d, killed %d of parent %d and bubblewrap %d: left: %s", i, victim, cmd.Process.Pid, outer, status)
			signalChild(pid, syscall.SIGKILL)
		}
		if len(pids) > 0 {
			left++
		}
	}
	if left > 0 {
		t.Errorf("%d of %d kills left something behind", left, rounds)
	}
	if met == 0 {
		t.Error("no kill met bubblewrap after its fork")
	}
}
