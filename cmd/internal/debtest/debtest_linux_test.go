package debtest

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

func needMachine(t *testing.T) {
	t.Helper()
	if os.Getenv("AGENTCONNECT_TEST_MACHINE") == "" || os.Getuid() != 0 {
		t.Skip("missing: the clean machine (`make test-deb`)")
	}
}

const workspace = "/home/tester/src/app"

// oldest is the package's file that is installed first.
const oldest = "/opt/test/old/pool/main/a/agentconnect-sandbox/*.deb"

// elsewhere runs its argument in a copy of the machine's root that is a root of its own: in a
// chroot nobody may make user namespaces.
const elsewhere = `
mount --make-rprivate /
mount -t tmpfs none /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay none -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
cd /mnt/root
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs none run
mount -t tmpfs none tmp
chmod 1777 tmp
mkdir -p opt/test old
mount --bind /opt/test opt/test
pivot_root . old
umount -l /old
exec sh -ec "$1"
`

const withoutSystemd = `
cp /opt/test/old/agentconnect-archive-keyring.pgp /usr/share/keyrings/
cp /opt/test/old/agentconnect.sources /etc/apt/sources.list.d/
apt-get -q update
apt-get -q -y --no-install-recommends install agentconnect-sandbox
useradd --create-home eve
as() { setpriv --reuid eve --regid eve --init-groups env -i HOME=/home/eve USER=eve PATH=/usr/bin:/bin "$@"; }
as agentconnect up 2>&1 && exit 1
as agentconnect probe
as agentconnect run &
until as agentconnect status | grep -q running; do sleep 0.2; done
as agentconnect agent add e --runtime selftest
as agentconnect prompt e "echo direct"
as agentconnect status
apt-get -q -y purge agentconnect-sandbox
wait
pgrep -la "agentconnect|bwrap" && exit 1
test -s /home/eve/.agentconnect/agents/e/agent.json
echo nothing is left
`

// chrooted runs its argument in a copy of the machine's root that has the machine's /run and all
// else of its kernel, as rescue systems and image builders make one.
const chrooted = `
mount --make-rprivate /
mount -t tmpfs none /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay none -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
for dir in dev proc run sys; do mount --rbind /$dir /mnt/root/$dir; done
exec chroot /mnt/root sh -ec "$1"
`

// TestPackage is the life of the package on one machine, in order: what fails ends it.
func TestPackage(t *testing.T) {
	needMachine(t)
	var before map[string]string
	step := func(name string, f func(t *testing.T)) {
		t.Helper()
		if !t.Run(name, f) {
			t.Fatalf("%s failed: what follows hangs on it", name)
		}
	}

	// A container, or WSL without systemd: nothing of it is there, and its root is not the host's.
	step("InstallWithoutSystemd", func(t *testing.T) {
		out := root.sh(t, "exec unshare --mount --pid --fork sh -ec '"+elsewhere+"' sh '"+withoutSystemd+"'")
		for _, word := range []string{"no user manager", "result: ok", "direct\n", "agents run as the daemon's own children", "nothing is left"} {
			if !strings.Contains(out, word) {
				t.Errorf("without %q:\n%s", word, out)
			}
		}
	})

	step("InstallFromTheSignedRepository", func(t *testing.T) {
		before = files(t)
		for _, name := range []string{"bwrap", "rg", "socat"} {
			if out, code := root.try(t, "command -v "+name); code == 0 {
				t.Fatalf("the machine is not clean: %s", out)
			}
		}
		from(t, "old")
		// The key counts: without it nothing is installed.
		root.sh(t, "mv /usr/share/keyrings/agentconnect-archive-keyring.pgp /root/key")
		if out, code := root.try(t, "apt-get -q -o APT::Update::Error-Mode=any update"); code == 0 {
			t.Errorf("apt takes the repository without its key:\n%s", out)
		}
		root.sh(t, "mv /root/key /usr/share/keyrings/agentconnect-archive-keyring.pgp && apt-get -q update")
		began := time.Now()
		t.Logf("%s", root.sh(t, "apt-get -q -y -o APT::Install-Recommends=yes install agentconnect-sandbox 2>&1"))
		t.Logf("installed after %.1f s", time.Since(began).Seconds())
		if out := root.sh(t, "dpkg --audit; dpkg --verify agentconnect-sandbox"); out != "" {
			t.Errorf("dpkg: %s", out)
		}
		// For nobody before somebody asks.
		if out, code := tester.try(t, "systemctl --user is-enabled agentconnect.service"); code == 0 {
			t.Errorf("the unit is enabled: %s", out)
		}
		if _, err := os.Stat("/etc/agentconnect"); err == nil {
			t.Error("there is an /etc/agentconnect")
		}
		// The parser decides about the profile: 3.0 fails on it, and then at every boot.
		_, parses := root.try(t, "apparmor_parser -Q -K /usr/share/agentconnect-sandbox/apparmor/agentconnect-sandbox")
		_, err := os.Stat("/etc/apparmor.d/agentconnect-sandbox")
		if (err == nil) != (parses == 0) {
			t.Errorf("the profile is there: %v; the parser takes it: %v", err == nil, parses == 0)
		}

		tester.sh(t, "mkdir -p "+workspace)
		tester.says(t, "agentconnect probe", "result: ok")
		// The manager was up before the bus came.
		tester.says(t, "agentconnect up", "the daemon runs")
		tester.sh(t, "agentconnect agent add alice --runtime selftest --workspace "+workspace)
		tester.says(t, "agentconnect prompt alice 'echo hello'", "hello")
		t.Logf("first sandboxed turn %.1f s after apt began", time.Since(began).Seconds())
	})

	step("UseAsDocumented", func(t *testing.T) {
		tester.says(t, "systemctl --user status agent@alice", "active (running)", "sandboxed")
		tester.says(t, "journalctl --user -u agent@alice --no-pager", "alice")
		tester.says(t, "agentconnect status", "running", "alice")
		pid := tester.sh(t, "systemctl --user show -P MainPID agent@alice")
		tester.sh(t, "agentconnect restart")
		if now := tester.sh(t, "systemctl --user show -P MainPID agent@alice"); now != pid {
			t.Errorf("restart touched the agent: %s, before %s", now, pid)
		}
		tester.says(t, "agentconnect agent exec alice -- cat /proc/self/attr/current; cat /home/tester/.profile && echo out; agentconnect agent exec alice -- cat /home/tester/.profile", "out", "No such file")
		// Pages and completions are where they are looked for.
		for _, path := range []string{
			"man/man1/agentconnect.1.gz", "man/man1/agentconnect-agent-add.1.gz", "man/man5/agentconnect.json.5.gz", "man/man7/agentconnect-units.7.gz",
			"man/man7/agentconnect-sandbox.7.gz", "bash-completion/completions/agentconnect", "zsh/vendor-completions/_agentconnect",
			"fish/vendor_completions.d/agentconnect.fish", "doc/agentconnect-sandbox/examples/editors/zed-settings.json", "doc/agentconnect-sandbox/copyright",
		} {
			if _, err := os.Stat("/usr/share/" + path); err != nil {
				t.Error(err)
			}
		}
	})

	step("AChrootWithTheMachinesRunLeavesItsAgentsAlone", func(t *testing.T) {
		daemon := tester.sh(t, "systemctl --user show -P MainPID agentconnect.service")
		agent := tester.sh(t, "systemctl --user show -P MainPID agent@alice")
		root.sh(t, "exec unshare --mount sh -ec '"+chrooted+"' sh 'dpkg --purge agentconnect-sandbox && ! test -e /usr/bin/agentconnect'")
		if now := tester.sh(t, "systemctl --user show -P MainPID agent@alice"); now != agent {
			t.Errorf("the agent was stopped: main process %s, before %s", now, agent)
		}
		if now := tester.sh(t, "systemctl --user show -P MainPID agentconnect.service"); now != daemon {
			t.Errorf("the daemon was stopped: main process %s, before %s", now, daemon)
		}
		tester.sh(t, "systemctl --user is-enabled agentconnect.service")
	})

	// A process of a user's is that user's to trace, and descriptors can be taken out of it.
	step("NothingOfRootsTerminalIsInAProcessOfAUsers", func(t *testing.T) {
		manager := strings.TrimSpace(tester.sh(t, "pgrep -o -u tester -x systemd"))
		tester.sh(t, "kill -STOP "+manager) // systemctl waits for it
		defer tester.sh(t, "kill -CONT "+manager)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		c := root.command(ctx, "exec script -qec 'tty && dpkg -i "+oldest+"' /dev/null")
		var said bytes.Buffer
		c.Stdout, c.Stderr = &said, &said
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		tester.until(t, "pgrep -u tester -x systemctl")
		if out := tester.sh(t, "pid=$(pgrep -u tester -x systemctl); ls -l /proc/$pid/fd; echo tty $(ps -o tty= -p $pid)"); strings.Contains(out, "/dev/pts/") || !strings.Contains(out, "tty ?") {
			t.Errorf("systemctl, as the user, has:\n%s", out)
		}
		tester.sh(t, "kill -CONT "+manager)
		if err := c.Wait(); err != nil || !strings.Contains(said.String(), "/dev/pts/") {
			t.Errorf("dpkg: %v:\n%s", err, &said)
		}
	})

	step("AnUpgradeThatWasCutShortIsNoChangeOfTheProfile", func(t *testing.T) {
		const profile, written = "/etc/apparmor.d/agentconnect-sandbox", "/var/lib/agentconnect-sandbox/apparmor-profile"
		if _, err := os.Stat(profile); err != nil {
			return // the parser does not know it
		}
		root.sh(t, "for file in "+profile+" "+written+"; do echo '# as an older version had it' >>$file; done")
		// The script is killed when it has replaced the first of the two.
		root.sh(t, `printf '%s\n' '#!/bin/sh' '/usr/bin/mv "$@"' 'kill -9 $PPID' >/usr/local/sbin/mv && chmod +x /usr/local/sbin/mv`)
		if out, code := root.try(t, "dpkg -i "+oldest); code == 0 || !strings.Contains(out, "killed by signal") {
			t.Errorf("dpkg: exit code %d:\n%s", code, out)
		}
		if out := root.sh(t, "rm /usr/local/sbin/mv && dpkg --configure -a 2>&1"); strings.Contains(out, "was changed") {
			t.Errorf("dpkg: %s", out)
		}
		root.sh(t, "cmp "+profile+" "+written+" && cmp "+profile+" /usr/share/agentconnect-sandbox/apparmor/agentconnect-sandbox")
	})

	step("TheDaemonRunsHoweverOftenItIsInstalled", func(t *testing.T) {
		// As many starts as systemd allows within a minute.
		tester.sh(t, "systemctl --user reset-failed agentconnect.service; for i in 1 2 3 4 5; do systemctl --user restart agentconnect.service || exit; done")
		if out := root.sh(t, "dpkg -i "+oldest+" 2>&1"); strings.Contains(out, "did not follow") {
			t.Errorf("dpkg: %s", out)
		}
		tester.sh(t, "agentconnect status | grep -q 'daemon .*running ('")
	})

	step("UpgradeWithTheAgentRunningAndAnEditorAttached", func(t *testing.T) {
		e := tester.attach(t, "alice", workspace)
		agent := tester.sh(t, "systemctl --user show -P MainPID agent@alice")
		daemon := tester.sh(t, "systemctl --user show -P MainPID agentconnect.service")
		from(t, "new")
		// A turn that lasts longer than the upgrade, and turns beside it, one after the other.
		open := e.prompt("sleep 3600")
		other := tester.attach(t, "alice", workspace)
		stop, turns := make(chan struct{}), make(chan int, 1)
		go func() {
			n := 0
			for {
				select {
				case <-stop:
					turns <- n
					return
				default:
				}
				text := strings.Repeat(fmt.Sprintf("turn %d of the editor; ", n), 200)
				if r, said := other.answer(other.prompt("echo " + text)); said != strings.TrimSpace(text) && said != text || !strings.Contains(string(r), "end_turn") {
					t.Errorf("turn %d: %d bytes of %d, %s", n, len(said), len(text), r)
				}
				n++
			}
		}()
		root.sh(t, "apt-get -q -y install --only-upgrade agentconnect-sandbox")
		tester.until(t, "agentconnect status | grep -q 'running.*next1'")
		close(stop)
		t.Logf("%d turns during the upgrade", <-turns)
		if _, err := e.in.Write([]byte(fmt.Sprintf(`{"jsonrpc":"2.0","method":"session/cancel","params":{"sessionId":%q}}`+"\n", e.session))); err != nil {
			t.Fatal(err)
		}
		if r, _ := e.answer(open); !strings.Contains(string(r), "cancelled") {
			t.Errorf("the turn that was open: %s", r)
		}
		if now := tester.sh(t, "systemctl --user show -P MainPID agent@alice"); now != agent {
			t.Errorf("the upgrade touched the agent")
		}
		if now := tester.sh(t, "systemctl --user show -P MainPID agentconnect.service"); now == daemon {
			t.Errorf("the upgrade did not restart the daemon")
		}
		tester.says(t, "agentconnect status", "still runs the older build")
		// The new programs serve a new start.
		tester.sh(t, "agentconnect agent restart alice")
		tester.says(t, "agentconnect prompt alice 'echo new'", "new")
		if out := tester.sh(t, "agentconnect status"); strings.Contains(out, "older build") {
			t.Errorf("after the restart:\n%s", out)
		}
	})

	step("TwoUsersDoNotReachEachOther", func(t *testing.T) {
		root.sh(t, "loginctl enable-linger guest")
		guest.until(t, "systemctl --user is-active -q default.target")
		// Who comes from npm's: its configuration as it is, its unit by the command that is printed.
		guest.sh(t, `umask 077 && mkdir -p ~/.agentconnect ~/.config/systemd/user && echo '{"version":1,"daemonId":"d-1","limits":{"idleSweepMs":1000},"features":{"x":true}}' >~/.agentconnect/config.json &&
			printf '[Service]\nExecStart=/usr/bin/npx @agentconnect.md/cli run\n' >~/.config/systemd/user/agentconnect.service && systemctl --user daemon-reload`)
		_, remedy, ok := strings.Cut(guest.says(t, "agentconnect up", "to move over: "), "to move over: ")
		if !ok {
			t.FailNow()
		}
		guest.sh(t, strings.TrimSpace(remedy))
		guest.says(t, "agentconnect config", "limits.idleSweepMs", "features")
		guest.says(t, "agentconnect up", "the daemon runs")
		guest.sh(t, "grep -q idleSweepMs ~/.agentconnect/config.json")
		guest.sh(t, "agentconnect agent add bob --runtime selftest && agentconnect agent start bob")
		for _, pair := range []struct {
			w, other  who
			id, their string
		}{{tester, guest, "alice", "bob"}, {guest, tester, "bob", "alice"}} {
			if out := pair.w.sh(t, "agentconnect status"); strings.Contains(out, pair.their) {
				t.Errorf("%s sees %s:\n%s", pair.w.name, pair.their, out)
			}
			socket := fmt.Sprintf("/run/user/%d/agentconnect/control.sock", pair.other.uid)
			reach := "ls -A /home/" + pair.other.name + " || socat - UNIX-CONNECT:" + socket + " </dev/null || systemctl --user status agent@" + pair.their + ".service"
			for where, script := range map[string]string{"outside": reach, "inside": "agentconnect agent exec " + pair.id + " -- sh -c '" + reach + "'"} {
				if out, code := pair.w.try(t, script); code == 0 {
					t.Errorf("%s, %s, reaches what is %s's:\n%s", pair.w.name, where, pair.other.name, out)
				}
			}
			if out := pair.w.sh(t, "agentconnect agent exec "+pair.id+" -- sh -c 'cat /proc/[0-9]*/cmdline | tr \"\\\\0\" \" \"'"); strings.Contains(out, "supervisor") {
				t.Errorf("processes seen inside:\n%s", out)
			}
			// The control: their owner reaches them.
			pair.other.sh(t, "socat - UNIX-CONNECT:"+socket+" </dev/null && ls -A /home/"+pair.other.name)
		}
	})

	step("SystemUserAsAServiceAccount", func(t *testing.T) {
		root.sh(t, "useradd --system --create-home --home-dir /var/lib/agents --shell /usr/sbin/nologin agents && loginctl enable-linger agents")
		as := "systemd-run --quiet --pipe --wait --collect -p User=agents -p PAMName=login "
		root.until(t, as+"systemctl --user is-active -q default.target")
		root.says(t, as+"agentconnect up", "the daemon runs")
		root.sh(t, as+"agentconnect agent add carol --runtime selftest")
		root.says(t, as+"agentconnect prompt carol 'echo served'", "served")
		root.sh(t, as+"agentconnect down")
		root.sh(t, "loginctl disable-linger agents; loginctl terminate-user agents; sleep 1; userdel -r agents 2>&1 || true")
	})

	step("HostsThatLackSomething", func(t *testing.T) {
		root.sh(t, "useradd --create-home dave")
		dave := who{"dave", 1002}
		dave.says(t, "agentconnect up", "no user manager", "loginctl enable-linger dave")
		dave.says(t, "agentconnect probe", "result: ok")
		root.says(t, "unshare --mount sh -c 'mount --bind -o ro /home/dave /home/dave && mount -o remount,bind,ro /home/dave && exec setpriv --reuid dave --regid dave --init-groups env -i HOME=/home/dave PATH=/usr/bin:/bin agentconnect agent add e --runtime selftest'",
			"read-only")
		// Root is told that agents are not root's, and nothing is enabled that would fail in each session.
		root.says(t, "agentconnect probe", "probe as the user who runs agents")
		root.sh(t, "loginctl enable-linger root")
		root.until(t, "XDG_RUNTIME_DIR=/run/user/0 systemctl --user is-active -q default.target")
		root.says(t, "XDG_RUNTIME_DIR=/run/user/0 agentconnect up", "do not run agents as root")
		if out, code := root.try(t, "XDG_RUNTIME_DIR=/run/user/0 systemctl --user is-enabled agentconnect.service"); code == 0 {
			t.Errorf("the unit is enabled for root: %s", out)
		}
		root.sh(t, "loginctl disable-linger root && rm -rf /root/.agentconnect")
		// Required mode in a shell's environment is not the daemon's.
		if out, code := tester.try(t, "AGENTCONNECT_REQUIRE_SANDBOX=1 agentconnect up"); code != 78 || !strings.Contains(out, "without required mode") {
			t.Errorf("up in a shell that requires the sandbox: exit code %d\n%s", code, out)
		}
		// Nobody may make user namespaces: said, with the remedy, and nothing starts.
		out, code := dave.try(t, "exec unshare -Urmpf --mount-proc sh -c 'echo 1 >/proc/sys/user/max_user_namespaces && exec unshare -U --map-user=1002 --map-group=1002 agentconnect probe'")
		if code != 69 || !strings.Contains(out, "userns-disabled") || !strings.Contains(out, "sysctl") {
			t.Errorf("probe without user namespaces: exit code %d\n%s", code, out)
		}
	})

	step("RemovalStopsEverythingAndKeepsROOT", func(t *testing.T) {
		// A daemon that no manager keeps goes, too.
		free := tester.command(t.Context(), "exec agentconnect run --root /home/tester/other --supervisor direct")
		if err := free.Start(); err != nil {
			t.Fatal(err)
		}
		tester.until(t, "agentconnect --root /home/tester/other status | grep -q 'daemon .*running'")
		t.Logf("%s", root.sh(t, "apt-get -q -y remove agentconnect-sandbox 2>&1"))
		_ = free.Wait()
		if out, code := root.try(t, "pgrep -la 'agentconnect|bwrap'"); code == 0 {
			t.Errorf("still running:\n%s", out)
		}
		for _, w := range []who{tester, guest} {
			if out := w.sh(t, "systemctl --user list-units --all --plain --no-legend 'agent*'"); strings.Contains(out, "active") && !strings.Contains(out, "not-found inactive") {
				t.Errorf("units of %s:\n%s", w.name, out)
			}
		}
		tester.sh(t, "test -s ~/.agentconnect/agents/alice/agent.json")
	})

	step("InstalledAgainItGoesOnAsBefore", func(t *testing.T) {
		root.sh(t, "apt-get -q -y install agentconnect-sandbox")
		tester.says(t, "agentconnect up", "the daemon runs")
		tester.says(t, "agentconnect prompt alice 'echo again'", "again")
	})

	step("PurgeLeavesNothingButROOT", func(t *testing.T) {
		t.Logf("%s", root.sh(t, "apt-get -q -y purge agentconnect-sandbox 2>&1"))
		tester.sh(t, "test -s ~/.agentconnect/agents/alice/agent.json && ! test -e ~/.config/systemd/user/default.target.wants/agentconnect.service")
		root.sh(t, "rm /usr/share/keyrings/agentconnect-archive-keyring.pgp /etc/apt/sources.list.d/agentconnect.sources; userdel -r dave 2>/dev/null || true")
		// What the other packages brought is theirs.
		known := map[string]bool{}
		for line := range strings.Lines(root.sh(t, "cat /var/lib/dpkg/info/*.list; cat /var/lib/dpkg/info/*.conffiles | cut -d' ' -f1")) {
			known[strings.TrimSpace(line)] = true
		}
		theirs := []string{"/etc/ld.so.cache", "/etc/apparmor.d/local", "/etc/apparmor.d/cache", "/etc/apparmor.d/tunables", "/etc/hosts.", "/usr/share/man/man1/pager", "/etc/passwd", "/etc/shadow", "/etc/group", "/etc/gshadow", "/etc/subuid", "/etc/subgid", "/etc/.pwd.lock", "/etc/alternatives", "/etc/systemd/system", "/etc/systemd/user/sockets.target.wants", "/etc/rc", "/etc/machine-id", "/var/lib/private",
			"/var/lib/dbus", "/var/lib/polkit", "/usr/share/mime", "/usr/bin/pager", "/var/spool"}
		after := files(t)
		for _, path := range slices.Sorted(maps.Keys(after)) {
			if before[path] == after[path] || known[path] || known["/usr"+path] || known[strings.TrimPrefix(path, "/usr")] {
				continue
			}
			if strings.Contains(path, "agentconnect") {
				t.Errorf("left: %s %s", path, after[path])
			}
			if !slices.ContainsFunc(theirs, func(p string) bool { return strings.HasPrefix(path, p) }) {
				t.Errorf("new or changed, and no package's: %s: %q, before %q", path, after[path], before[path])
			}
		}
	})
}

// TestZAutopkgtest runs the package's DEP-8 tests, here in the machine: after all others.
func TestZAutopkgtest(t *testing.T) {
	needMachine(t)
	from(t, "new")
	root.sh(t, "apt-get -q -y install autopkgtest")
	// debian/files makes it a tree that is built: what is tested comes from the repository.
	// The machine is a container; Debian 13's null runner does not say so.
	out, code := root.try(t, "cd /root && cp -R /opt/test/source /root/source && touch /root/source/debian/files && autopkgtest -B --ignore-restrictions=isolation-container /root/source -- null 2>&1")
	t.Logf("%s", out)
	_, summary, _ := strings.Cut(out, " summary\n")
	for _, name := range []string{"superficial", "life"} {
		if !slices.ContainsFunc(strings.Split(summary, "\n"), func(line string) bool {
			f := strings.Fields(line)
			return len(f) > 1 && f[0] == name && f[1] == "PASS"
		}) {
			t.Errorf("%s did not pass", name)
		}
	}
	if code != 0 {
		t.Errorf("autopkgtest: exit code %d", code)
	}
}
