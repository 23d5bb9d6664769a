package supervisor

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMountsOfWhatHasEndedSaySo(t *testing.T) {
	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	open := func() error {
		f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", cmd.Process.Pid))
		if err == nil {
			f.Close()
		}
		return err
	}
	if err := unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	if err := open(); !saysEnded(err) {
		t.Errorf("ended and not waited for: %v", err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if err := open(); !saysEnded(err) {
		t.Errorf("ended and waited for: %v", err)
	}
	for _, err := range []error{nil, unix.EACCES, unix.EMFILE} {
		if saysEnded(err) {
			t.Errorf("%v says that it has ended", err)
		}
	}
}
