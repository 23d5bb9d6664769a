// Running the attack table.

package selftest

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Attack is one line of the table.
type Attack struct {
	ID    string
	Ref   string // see Result
	Title string
	Means string // see Result
	Kind  Kind
	// Control: see Result.
	Control bool
	run     func(context.Context, *Targets) (Seen, string)
}

// ErrRoot: some attacks are harmless only for an ordinary user.
var ErrRoot = errors.New("attack table: refused as the host's root: some attacks would change the machine; run it as an ordinary user")

// Run runs the table against t, one attack after the other, and tells each (may be
// nil) about every result as it comes. When ctx ends, so does the table, with ctx's error.
func Run(ctx context.Context, t Targets, each func(Result)) (*Report, error) {
	if hostRoot() {
		return nil, ErrRoot
	}
	t.fill()
	report := &Report{}
	for _, a := range Attacks() {
		if err := ctx.Err(); err != nil {
			return report, err
		}
		seen, detail := a.run(ctx, &t)
		expected := Refused
		if a.Kind == MustWork {
			expected = Worked
		}
		r := Result{ID: a.ID, Ref: a.Ref, Title: a.Title, Means: a.Means, Kind: a.Kind, Expected: expected, Seen: seen, OK: seen == expected || seen == Skipped, Control: a.Control, Detail: detail}
		report.add(r)
		if each != nil {
			each(r)
		}
	}
	return report, nil
}

func (t *Targets) fill() {
	if t.Workspace == "" {
		t.Workspace, _ = os.Getwd()
	}
	if t.Home == "" {
		t.Home = os.Getenv("HOME")
	}
	if t.Tmp == "" {
		t.Tmp = "/tmp"
	}
	run := fmt.Sprintf("/run/user/%d/", os.Getuid())
	usual := map[string]string{
		"bus":             run + "bus",
		"systemd-private": run + "systemd/private",
		"gpg-agent":       run + "gnupg/S.gpg-agent",
		"wayland":         run + "wayland-0",
		"system-bus":      "/run/dbus/system_bus_socket",
		"docker":          "/run/docker.sock",
	}
	sockets := make(map[string]string, len(usual)+len(t.Sockets))
	for _, m := range []map[string]string{usual, t.Sockets} {
		for k, v := range m {
			sockets[k] = v
		}
	}
	t.Sockets = sockets
}

// outcome turns the error of an attack's last step into what was seen.
func outcome(err error, worked string) (Seen, string) {
	if err != nil {
		return Refused, err.Error()
	}
	return Worked, worked
}

func refused(format string, args ...any) (Seen, string) { return Refused, fmt.Sprintf(format, args...) }
func worked(format string, args ...any) (Seen, string)  { return Worked, fmt.Sprintf(format, args...) }
func skipped(why string) (Seen, string)                 { return Skipped, why }
