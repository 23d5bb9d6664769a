// Package probe finds out whether the boundary really starts on this host. It proves
// instead of guessing: the last of its checks starts the whole recipe, with canaries in
// every place that must stay out of reach, and looks from inside. What starts programs
// is given to it; it starts nothing of an agent's and changes nothing on the host but
// the canaries, which it takes away again.
package probe

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"agentconnect.md/sandbox/sandbox"
)

// Result levels of a check.
const (
	OK      = "ok"
	Failed  = "failed"
	Warning = "warning" // works, but something that some agents need does not
	Skipped = "skipped" // not looked at, since an earlier check failed
)

// Check is one typed check and what came of it.
type Check struct {
	Code   string `json:"code"`
	Title  string `json:"title"`
	Result string `json:"result"`
	Detail string `json:"detail,omitempty"`
	Remedy string `json:"remedy,omitempty"`
}

// Result is what a probe found.
type Result struct {
	OK     bool      `json:"ok"`
	Code   string    `json:"code"` // of the first failed check, or "ok"
	At     time.Time `json:"at"`
	Checks []Check   `json:"checks"`
}

// Codes of checks; they are stable.
const (
	CodeNotLinux       = "not-linux"
	CodeBwrapMissing   = "bwrap-missing"
	CodeBwrapOld       = "bwrap-old"
	CodeRgMissing      = "rg-missing"
	CodeSocatMissing   = "socat-missing"
	CodeUsernsDisabled = "userns-disabled"
	CodeUsernsAppArmor = "userns-apparmor"
	CodeKernelOld      = "kernel-old"
	CodeProcRefused    = "proc-refused"
	CodeNetnsRefused   = "netns-refused"
	CodeNestedRefused  = "nested-refused"
	CodeBoundaryLeak   = "boundary-leak"
	CodeOK             = "ok"
)

// titles and remedies of the codes: what is checked, and which command mends it.
var codes = map[string]struct{ title, remedy string }{
	CodeNotLinux: {"the kernel is Linux",
		"run agents on a Linux machine, or without a sandbox: `agentconnect agent edit ID --no-sandbox`"},
	CodeKernelOld: {"the kernel has mount_setattr and openat2 (Linux 5.12)",
		"install a newer kernel: `sudo apt install linux-image-amd64` and reboot"},
	CodeBwrapMissing: {"bubblewrap is installed and runs",
		"install it: `sudo apt install bubblewrap`"},
	CodeBwrapOld: {"bubblewrap is new enough (0.6.0)",
		"upgrade it: `sudo apt install bubblewrap` from Debian 12, Ubuntu 22.04 or newer"},
	CodeRgMissing: {"ripgrep is a program that runs",
		"install it: `sudo apt install ripgrep` (a shell function or alias does not do)"},
	CodeSocatMissing: {"socat is a program that runs",
		"install it: `sudo apt install socat` (a shell function or alias does not do)"},
	CodeUsernsDisabled: {"user namespaces may be made by ordinary users",
		"allow them: `sudo sysctl -w user.max_user_namespaces=15000 kernel.unprivileged_userns_clone=1` (the second where it exists), and in a file below /etc/sysctl.d for good"},
	CodeUsernsAppArmor: {"AppArmor lets our programs use user namespaces",
		"install this project's package, which brings the profile, or load it by hand: `sudo apparmor_parser -r /etc/apparmor.d/agentconnect-sandbox`"},
	CodeNetnsRefused: {"a network namespace with a loopback of its own",
		"allow network namespaces: `sudo sysctl -w user.max_net_namespaces=15000`; in a container, give it CAP_NET_ADMIN in its user namespace"},
	CodeProcRefused: {"a fresh /proc can be mounted",
		"in a container: start it with an unmasked /proc (`podman run --security-opt unmask=/proc/*`, `docker run --security-opt systempaths=unconfined`); else see what covers parts of it: `findmnt -R /proc`"},
	CodeBoundaryLeak: {"what must be out of reach is, and what is promised is writable",
		"do not run agents here; report this with the output of `agentconnect probe --json`"},
	CodeNestedRefused: {"an inner sandbox starts inside the boundary (for runtimes that bring one)",
		"agents with nesting off are not affected; for the others: `agentconnect agent edit ID --nesting off`"},
}

// newCheck makes a check with the texts of its code.
func newCheck(code, result, detail string) Check {
	c := Check{Code: code, Title: codes[code].title, Result: result, Detail: detail}
	if result != OK && result != Skipped {
		c.Remedy = codes[code].remedy
	}
	return c
}

// Finding is what one look from inside the boundary found.
type Finding struct {
	What   string
	Path   string
	OK     bool
	Detail string
}

// Runner starts the recipe for the probe.
type Runner interface {
	// Inside starts the boundary with canaries in every place that must stay out of
	// reach, looks from inside, and gives what was found.
	Inside(ctx context.Context, nesting bool) ([]Finding, error)
	// Try reports whether a reduced recipe starts: fresh namespaces (with a network
	// namespace or without), bubblewrap with a fresh /proc or without.
	Try(ctx context.Context, what Reduced) error
}

// Reduced is a part of the recipe, started alone to tell causes apart. No message of
// another program is read for that: only whether it works.
type Reduced string

const (
	ReducedUserns    Reduced = "user namespace"
	ReducedMount     Reduced = "mount in a user namespace"
	ReducedNetns     Reduced = "network namespace"
	ReducedBwrap     Reduced = "bubblewrap without /proc"
	ReducedBwrapProc Reduced = "bubblewrap with a fresh /proc"
)

// Host is what the probe reads of the host.
type Host interface {
	// System gives the kernel's name and release, as uname(2) does.
	System() (name, release string)
	// Sysctl reads a value below /proc/sys, "" if it does not exist.
	Sysctl(name string) string
	// Program runs a program with arguments and gives its first line; name is an
	// absolute path or is looked for in PATH as a file.
	Program(ctx context.Context, name string, args ...string) (string, error)
	// Syscalls says why the kernel lacks a system call that we need, or nil.
	Syscalls() error
	UID() int
}

// Bwrap is where bubblewrap must lie: the path that AppArmor profiles name.
const Bwrap = "/usr/bin/bwrap"

// Run makes every check. It always gives a result, whatever the host is.
func Run(ctx context.Context, h Host, r Runner, now time.Time) Result {
	p := &run{host: h, runner: r}
	for _, f := range []func(context.Context) bool{p.system, p.kernel, p.bwrap, p.tools, p.live, p.nested} {
		if ctx.Err() != nil {
			break
		}
		if !f(ctx) {
			break
		}
	}
	res := Result{OK: true, Code: CodeOK, At: now, Checks: p.checks}
	for _, c := range p.checks {
		if c.Result == Failed {
			res.OK, res.Code = false, c.Code
			break
		}
	}
	if err := ctx.Err(); err != nil && res.OK {
		res.OK, res.Code = false, CodeBoundaryLeak
		res.Checks = append(res.Checks, newCheck(CodeBoundaryLeak, Failed, "the probe was cut short: "+err.Error()))
	}
	return res
}

type run struct {
	host   Host
	runner Runner
	checks []Check
}

func (p *run) add(code, result, detail string) bool {
	p.checks = append(p.checks, newCheck(code, result, detail))
	return result != Failed
}

func (p *run) system(context.Context) bool {
	name, release := p.host.System()
	if name != "Linux" {
		return p.add(CodeNotLinux, Failed, "this is "+name)
	}
	// WSL1 translates system calls and calls itself "-Microsoft"; WSL2 is a real kernel,
	// "-microsoft-standard-WSL2".
	if strings.HasSuffix(release, "-Microsoft") {
		p.checks = append(p.checks, Check{
			Code: CodeNotLinux, Title: codes[CodeNotLinux].title, Result: Failed,
			Detail: "this is WSL 1, which has no Linux kernel", Remedy: "convert it: `wsl --set-version DISTRO 2` in Windows",
		})
		return false
	}
	return p.add(CodeNotLinux, OK, name+" "+release)
}

func (p *run) kernel(context.Context) bool {
	_, release := p.host.System()
	if err := p.host.Syscalls(); err != nil {
		return p.add(CodeKernelOld, Failed, release+": "+err.Error())
	}
	return p.add(CodeKernelOld, OK, release)
}

func (p *run) bwrap(ctx context.Context) bool {
	line, err := p.host.Program(ctx, Bwrap, "--version")
	if err != nil {
		return p.add(CodeBwrapMissing, Failed, err.Error())
	}
	p.add(CodeBwrapMissing, OK, Bwrap)
	v, ok := sandbox.ParseBwrapVersion(line)
	if !ok || v.Before(sandbox.BwrapOldest) {
		return p.add(CodeBwrapOld, Failed, line)
	}
	if !v.DisablesUserns() {
		line += ": it lacks --disable-userns (0.8.0), which is the second lock on user namespaces inside; the system call filter, which is the first, holds"
	}
	return p.add(CodeBwrapOld, OK, line)
}

// tools looks at the programs that the boundary's other parts use. All are looked at.
func (p *run) tools(ctx context.Context) bool {
	good := true
	for _, t := range []struct{ code, name, flag string }{{CodeRgMissing, "rg", "--version"}, {CodeSocatMissing, "socat", "-V"}} {
		line, err := p.host.Program(ctx, t.name, t.flag)
		if err != nil {
			good = p.add(t.code, Failed, err.Error()) && good
			continue
		}
		p.add(t.code, OK, line)
	}
	return good
}

// NotLaidError says that there are no canaries to look for: a full disk, say. Nothing is known of
// the boundary then.
type NotLaidError struct{ Err error }

func (e *NotLaidError) Error() string { return "the canaries cannot be laid: " + e.Err.Error() }

func (e *NotLaidError) Unwrap() error { return e.Err }

// notLaid is what is to be done about it.
const notLaid = "free space there, or make it writable, and probe again: `agentconnect probe`"

// notRoot is what is to be done by root, for whom the boundary is not made.
const notRoot = "probe as the user who runs agents, never as root: `su - USER -c 'agentconnect probe'`"

// live starts the whole recipe; where it does not start, parts of it tell why.
func (p *run) live(ctx context.Context) bool {
	findings, err := p.runner.Inside(ctx, false)
	var none *NotLaidError
	if errors.As(err, &none) {
		c := newCheck(CodeBoundaryLeak, Failed, "nothing was looked at: "+err.Error())
		c.Remedy = notLaid
		p.checks = append(p.checks, c)
		return false
	}
	if err != nil {
		return p.why(ctx, err)
	}
	p.add(CodeUsernsDisabled, OK, "")
	p.network(findings)
	p.add(CodeProcRefused, OK, "")
	var bad []string
	looks := 0
	for _, f := range findings {
		if f.What != FindingNetwork {
			looks++
		}
		if !f.OK {
			bad = append(bad, strings.TrimSpace(f.What+" "+f.Path+": "+f.Detail))
		}
	}
	switch {
	case looks == 0:
		return p.add(CodeBoundaryLeak, Failed, "nothing was looked at")
	case len(bad) > 0:
		c := newCheck(CodeBoundaryLeak, Failed, strings.Join(bad, "; "))
		if p.host.UID() == 0 {
			c.Remedy = notRoot
		}
		p.checks = append(p.checks, c)
		return false
	}
	return p.add(CodeBoundaryLeak, OK, fmt.Sprintf("%d looks from inside", looks))
}

// network says what the network namespace lacks: that only the ports of rules lead out is
// no failure.
func (p *run) network(findings []Finding) {
	for _, f := range findings {
		if f.What == FindingNetwork && f.Detail != "" {
			c := newCheck(CodeNetnsRefused, Warning, f.Detail+": agents reach only the ports that rules name (22, 80 and 443 without any), and all else is refused")
			c.Remedy = "load it: `sudo modprobe -a nft_chain_nat nft_nat`, or use the distribution's kernel"
			p.checks = append(p.checks, c)
			return
		}
	}
	p.add(CodeNetnsRefused, OK, "")
}

func (p *run) why(ctx context.Context, err error) bool {
	detail := err.Error()
	if e := p.runner.Try(ctx, ReducedUserns); e != nil {
		if p.appArmor() {
			return p.add(CodeUsernsAppArmor, Failed, e.Error())
		}
		return p.add(CodeUsernsDisabled, Failed, e.Error()+p.sysctls())
	}
	if e := p.runner.Try(ctx, ReducedMount); e != nil {
		// A namespace without capabilities in it: that is what AppArmor's restriction gives.
		if p.appArmor() {
			return p.add(CodeUsernsAppArmor, Failed, e.Error())
		}
		return p.add(CodeUsernsDisabled, Failed, "a user namespace without rights: "+e.Error()+p.sysctls())
	}
	p.add(CodeUsernsDisabled, OK, "")
	if e := p.runner.Try(ctx, ReducedNetns); e != nil {
		return p.add(CodeNetnsRefused, Failed, e.Error())
	}
	p.add(CodeNetnsRefused, OK, "")
	if e := p.runner.Try(ctx, ReducedBwrap); e == nil {
		if e := p.runner.Try(ctx, ReducedBwrapProc); e != nil {
			return p.add(CodeProcRefused, Failed, e.Error())
		}
		p.add(CodeProcRefused, OK, "")
	} else if p.appArmor() {
		return p.add(CodeUsernsAppArmor, Failed, e.Error())
	}
	return p.add(CodeBoundaryLeak, Failed, "the boundary does not start: "+detail)
}

func (p *run) appArmor() bool {
	return p.host.Sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1"
}

func (p *run) sysctls() string {
	var out strings.Builder
	for _, n := range []string{"user/max_user_namespaces", "kernel/unprivileged_userns_clone"} {
		if v := p.host.Sysctl(n); v != "" {
			fmt.Fprintf(&out, "; %s=%s", strings.ReplaceAll(n, "/", "."), v)
		}
	}
	return out.String()
}

// nested looks whether an inner sandbox starts; that it does not is no failure of ours.
func (p *run) nested(ctx context.Context) bool {
	findings, err := p.runner.Inside(ctx, true)
	detail := ""
	found := false
	if err != nil {
		detail = err.Error()
	}
	for _, f := range findings {
		if f.What == FindingNested {
			found = true
			if !f.OK {
				detail = f.Detail
			}
		}
	}
	if detail == "" && !found {
		detail = "it was not looked at"
	}
	if detail != "" {
		if p.host.UID() == 0 {
			detail += " (this probe ran as root: bubblewrap starts as root, an inner one with uid 0 does not; agents never run as root, so probe as the user who runs them)"
		}
		return p.add(CodeNestedRefused, Warning, detail)
	}
	return p.add(CodeNestedRefused, OK, "")
}

// FindingNetwork is the What of the finding about the network: its Detail says what the
// namespace lacks, or nothing.
const FindingNetwork = "network"

// FindingNested is the What of the finding about an inner sandbox.
const FindingNested = "nested"
