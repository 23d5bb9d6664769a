package wire

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"agentconnect.md/sandbox/sandbox"
)

func sample() *Launch {
	return &Launch{
		Version: Version, Argv: []string{"/bin/x", "a b", "\xff\xfe", ""}, Env: []string{"A=1"}, Dir: "/w\n", Bwrap: "/usr/bin/bwrap", Seccomp: []byte{0, 1, 2}, PassFD: true, PassEnv: true, Ports: []uint16{22, 65535}, Join: true, Dial: true,
		Plan: &sandbox.Plan{Agent: "a", Network: sandbox.NetworkNone, Nesting: true, DieWithParent: true, OldBwrap: true, Notes: []string{"n"}, Mounts: []sandbox.Mount{
			{Op: sandbox.OpBind, Target: "/t\xff", Source: "/s", Access: sandbox.ReadOnly, Kind: sandbox.KindDir, Create: true, Pinned: true, Grant: true, Content: "c", Mode: 0o755, Size: 1 << 40, Why: "w"},
		}},
	}
}

func TestLaunchSurvivesTheBinaryForm(t *testing.T) {
	for _, want := range []*Launch{sample(), {Version: Version, Argv: []string{"x"}, Env: []string{}, Seccomp: []byte{}, Ports: []uint16{}}} {
		got, err := DecodeLaunch(want.Encode())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	}
	for _, want := range []*LaunchError{{Step: "open", Path: "/x\xff", Err: "gone", Retry: true}, {}} {
		got, err := DecodeLaunchError(want.Encode())
		if err != nil || *got != *want {
			t.Errorf("%+v %v", got, err)
		}
	}
}

func TestAnotherVersionSaysWhatToDo(t *testing.T) {
	l := sample()
	l.Version++
	if _, err := DecodeLaunch(l.Encode()); err == nil || !strings.Contains(err.Error(), "start the agent again") {
		t.Error(err)
	}
}

func FuzzDecodeLaunch(f *testing.F) {
	f.Add(sample().Encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := DecodeLaunch(b)
		if err != nil {
			return
		}
		again, err := DecodeLaunch(l.Encode())
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(again.Encode(), l.Encode()) {
			t.Error("a decoded launch changes when it is encoded again")
		}
	})
}
