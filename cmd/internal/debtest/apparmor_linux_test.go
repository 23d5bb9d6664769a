package debtest

import (
	"os"
	"strings"
	"testing"
)

// ordinary is how Ubuntu's kernel treats every program without a profile of its own: all is
// allowed but user namespaces. Debian's kernel has no switch for it, so that a user's manager and
// its commands are put into this profile; a program with a profile leaves it for its own.
const ordinary = `abi <abi/4.0>,
include <tunables/global>
profile ordinary /usr/lib/systemd/systemd flags=(attach_disconnected,mediate_deleted) {
  allow capability,
  allow file rwlkm /{**,},
  allow network,
  allow unix,
  allow ptrace,
  allow signal,
  allow mqueue,
  allow io_uring,
  allow mount,
  allow umount,
  allow pivot_root,
  allow dbus,
  allow pix /**,
}
`

// TestAppArmor is what the package's profile is for, for two users: the manager of tester is
// unconfined, as all are on Debian; guest's may make no user namespaces, as on Ubuntu 24.04.
// What the profile allows is tried without it, too.
func TestAppArmor(t *testing.T) {
	if os.Getenv("AGENTCONNECT_TEST_MACHINE") != emulated || os.Getuid() != 0 {
		t.Skip("missing: the machine with AppArmor (`make test-apparmor`)")
	}
	const (
		bare    = "bwrap --ro-bind / / --unshare-user true"
		nested  = "bwrap --ro-bind / / --proc /proc --dev /dev " + bare
		profile = "/etc/apparmor.d/agentconnect-sandbox"
		inner   = "agentconnect agent exec nest -- " + bare
		loaded  = "grep agentconnect-sandbox /sys/kernel/security/apparmor/profiles"
	)
	confined := func(script string) string { return "aa-exec -p ordinary -- sh -c '" + script + "'" }
	refused := func(t *testing.T, w who, script string) {
		t.Helper()
		out, code := w.try(t, script)
		if code == 0 {
			t.Errorf("%s: %s: works; wanted: refused\n%s", w.name, script, out)
		}
		t.Logf("%s, refused: %s: exit code %d: %s", w.name, script, code, strings.TrimSpace(out))
	}
	works := func(t *testing.T, w who, script string) {
		t.Helper()
		t.Logf("%s, works: %s: %s", w.name, script, strings.TrimSpace(w.sh(t, script)))
	}
	step := func(name string, f func(t *testing.T)) {
		t.Helper()
		if !t.Run(name, f) {
			t.Fatalf("%s failed: what follows hangs on it", name)
		}
	}

	step("OrdinaryProgramsMakeNoUserNamespaces", func(t *testing.T) {
		if err := os.WriteFile("/etc/apparmor.d/ordinary", []byte(ordinary), 0o644); err != nil {
			t.Fatal(err)
		}
		root.sh(t, "apparmor_parser -r /etc/apparmor.d/ordinary && loginctl enable-linger guest")
		guest.until(t, "systemctl --user is-active -q default.target")
		if label := root.sh(t, "cat /proc/$(systemctl show -P MainPID user@1001.service)/attr/current"); !strings.HasPrefix(label, "ordinary") {
			t.Fatalf("guest's manager is %s", label)
		}
		refused(t, guest, confined(bare))
		refused(t, guest, confined("unshare --user --map-root-user true"))
		works(t, tester, bare)
		works(t, tester, nested)
	})

	step("TheProfileAllowsThemToTheSupervisor", func(t *testing.T) {
		from(t, "old")
		root.sh(t, "apt-get -q -y install agentconnect-sandbox 2>&1")
		root.says(t, loaded, "agentconnect-sandbox (unconfined)")
		for w, in := range map[who]func(string) string{guest: confined, tester: func(s string) string { return s }} {
			w.says(t, in("agentconnect probe"), "result: ok")
			w.says(t, in("agentconnect up"), "the daemon runs")
			w.sh(t, in("agentconnect agent add nest --runtime selftest --nesting on && agentconnect agent add plain --runtime selftest"))
			w.says(t, in("agentconnect prompt plain \"echo hello\""), "hello")
			works(t, w, in(inner))
			// Without nesting the system call filter denies them, profile or not.
			refused(t, w, in("agentconnect agent exec plain -- "+bare))
		}
		// To nobody else.
		refused(t, guest, confined(bare))
	})

	step("InnerBubblewrapWorksBesideBubblewrapsOwnProfile", func(t *testing.T) {
		root.sh(t, "cp /usr/share/apparmor/extra-profiles/bwrap-userns-restrict /etc/apparmor.d/ && apparmor_parser -r /etc/apparmor.d/bwrap-userns-restrict")
		// What that profile does: bubblewrap works, and what it starts has no capabilities.
		works(t, tester, bare)
		refused(t, tester, nested)
		works(t, guest, confined(bare))
		for w, in := range map[who]func(string) string{guest: confined, tester: func(s string) string { return s }} {
			w.says(t, in("agentconnect probe"), "result: ok")
			w.sh(t, in("agentconnect agent restart nest"))
			works(t, w, in(inner))
		}
	})

	step("SwitchedOffAsDocumentedItFailsClosed", func(t *testing.T) {
		root.sh(t, "mkdir -p /etc/apparmor.d/disable && ln -s "+profile+" /etc/apparmor.d/disable/ && apparmor_parser -R "+profile)
		// Where user namespaces are allowed the boundary starts, and no sandbox inside it.
		tester.sh(t, "agentconnect agent restart nest")
		refused(t, tester, inner)
		// Where they are not, nothing does.
		out, code := guest.try(t, confined("agentconnect probe"))
		if code != 69 || !strings.Contains(out, "userns-") {
			t.Errorf("probe: exit code %d\n%s", code, out)
		}
		t.Logf("guest's probe without the profile: %s", out)
		guest.sh(t, confined("agentconnect agent stop nest"))
		refused(t, guest, confined("agentconnect agent start nest"))
		refused(t, guest, confined(inner))
	})

	step("AnUpgradeLeavesItOff", func(t *testing.T) {
		from(t, "new")
		root.sh(t, "apt-get -q -y install --only-upgrade agentconnect-sandbox 2>&1")
		refused(t, root, loaded)
		root.sh(t, "rm /etc/apparmor.d/disable/agentconnect-sandbox && apparmor_parser -r "+profile)
		guest.says(t, confined("agentconnect probe"), "result: ok")
		guest.sh(t, confined("agentconnect agent restart nest"))
		works(t, guest, confined(inner))
	})

	step("RemovalUnloadsIt", func(t *testing.T) {
		root.sh(t, "apt-get -q -y purge agentconnect-sandbox 2>&1")
		refused(t, root, loaded)
		refused(t, root, "ls "+profile)
	})
}
