// Package systemdtest gives tests a real user manager: that of the test machine, which
// `make test-systemd` boots. It is for tests alone, and it never touches the manager of the
// machine that the tests are built on.
package systemdtest

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"time"

	"agentconnect.md/sandbox/dbusctl"
)

// The test machine's ordinary users: the first one lingers and has a manager, the second has none.
const (
	Tester = "tester"
	Guest  = "guest"
)

// NeedMachine skips outside of the test machine.
func NeedMachine(t testing.TB) {
	t.Helper()
	if os.Getenv("AGENTCONNECT_TEST_MACHINE") == "" {
		t.Skip("missing: the test machine: make test-systemd")
	}
}

// Place is where the calling user's manager is, if there is one.
func Place() dbusctl.Place {
	return dbusctl.Here(os.Getenv("XDG_RUNTIME_DIR"), os.Getenv("USER"))
}

// Manager connects to the user's manager until the test's end. What happens to the connection
// is in the test's log.
func Manager(t testing.TB) *dbusctl.Conn {
	t.Helper()
	NeedMachine(t)
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	c, err := dbusctl.Connect(t.Context(), Place(), log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// Within is a context for what must end by itself within that time; when it does not, the test
// has the time to say so.
func Within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
