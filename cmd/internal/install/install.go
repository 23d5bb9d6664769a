// Package install puts an ACP runtime that npm brings below ROOT/runtimes, where agents see
// it read-only. npm and the packages' own scripts run behind a boundary of their own that
// reaches the operator's registry and nothing else: what is downloaded has run nowhere
// else before an agent starts it. It installs nothing outside ROOT and needs no daemon.
package install

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/egress"
	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/lazyregexp"
	"agentconnect.md/sandbox/cmd/internal/programs"
	"agentconnect.md/sandbox/cmd/internal/runtimes"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/hostfacts"
)

// Installer installs for one daemon user.
type Installer struct {
	User       string
	Home, Root string
	// Path is where npm and node are looked for, as in $PATH.
	Path     string
	Programs programs.Set
	// Environ is the operator's: npm reads its configuration from there.
	Environ []string
	Proxy   wire.Proxy
	// Say tells a person what goes on; may be nil.
	Say func(format string, args ...any) `json:"-"`
}

// Request asks the program that makes agents' namespaces to install. It holds the operator's
// environment, so it goes by a pipe.
type Request struct {
	Installer Installer        `json:"installer"`
	Runtime   runtimes.Runtime `json:"runtime"`
	Version   string           `json:"version,omitempty"`
}

// Result is its answer.
type Result struct {
	Version string `json:"version,omitempty"`
	Error   string `json:"error,omitempty"`
}

// By installs in that program: what the host lets us do (AppArmor) may hang on it. What it
// tells goes to say, which may be nil.
func By(ctx context.Context, supervisor string, q Request, say io.Writer) (string, error) {
	question, err := json.Marshal(q)
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, supervisor, "install")
	cmd.Stdin, cmd.Stderr = bytes.NewReader(question), say
	// It ends npm and takes its files away before it ends.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	answer, err := cmd.Output()
	var r Result
	if jerr := json.Unmarshal(answer, &r); jerr != nil {
		return "", fmt.Errorf("%s did not install: %w", supervisor, errors.Join(err, jerr))
	}
	if r.Error != "" {
		return "", errors.New(r.Error)
	}
	return r.Version, err
}

// limit bounds one installation.
const limit = 20 * time.Minute

// dir is where the installations of a runtime lie, one per version, and the link "bin" to
// the programs of the one that counts.
func (i *Installer) dir(rt runtimes.Runtime) string {
	return filepath.Join(i.Root, "runtimes", rt.ID)
}

// bin is the link that agents' runtimes are found by.
const bin = "bin"

// Installed gives the version that counts; empty: none of ours.
func (i *Installer) Installed(rt runtimes.Runtime) string {
	version, _, _ := strings.Cut(i.current(rt), "_")
	return version
}

// current is the directory of the version that counts, by its name.
func (i *Installer) current(rt runtimes.Runtime) string {
	to, err := os.Readlink(filepath.Join(i.dir(rt), bin))
	if err != nil {
		return ""
	}
	name, _, _ := strings.Cut(to, "/")
	return name
}

var validVersion = lazyregexp.New(`^[0-9]+\.[0-9]+\.[0-9]+[0-9A-Za-z.+-]*$`)

// Install brings version of rt, its pinned one where that is empty, and makes it the one
// that counts. Agents that run keep what they have; each start takes the new one.
func (i *Installer) Install(ctx context.Context, rt runtimes.Runtime, version string) (string, error) {
	if version == "" {
		version = rt.Version
	}
	switch {
	case rt.Internal:
		return "", fmt.Errorf("%s is part of agentconnect", rt.ID)
	case rt.NPM == "" || rt.Custom:
		return "", fmt.Errorf("%s does not come from npm: %s", rt.ID, rt.Install)
	case !validVersion().MatchString(version):
		return "", fmt.Errorf("%q is no version: write it as in %s@%s", version, rt.ID, rt.Version)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("npm was not done after %s", limit))
	defer cancel()
	npm, err := i.find("npm")
	if err != nil {
		return "", err
	}
	node, err := i.find("node")
	if err != nil {
		return "", err
	}
	text, err := i.configured(ctx, npm.Program, "registry")
	if err != nil {
		return "", err
	}
	registry, err := registryURL(text)
	if err != nil {
		return "", err
	}
	authorities, err := i.configured(ctx, npm.Program, "cafile")
	if err != nil {
		return "", err
	}
	allow, err := ways(ctx, registry)
	if err != nil {
		return "", err
	}
	stage, err := i.stage()
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(stage)
	i.say("%s@%s from %s; npm runs behind a boundary that reaches %s alone", rt.NPM, version, registry.Host, strings.Join(allow, ", "))
	if err := prepare(stage, authorities); err != nil {
		return "", err
	}
	if err := i.run(ctx, stage, rt.NPM+"@"+version, registry, allow, npm, node); err != nil {
		return "", err
	}
	return version, i.adopt(rt, version, filepath.Join(stage, "workspace"))
}

func (i *Installer) say(format string, args ...any) {
	if i.Say != nil {
		i.Say(format, args...)
	}
}

func (i *Installer) find(program string) (runtimes.Installation, error) {
	in, err := runtimes.Find(runtimes.Options{Home: i.Home, Root: i.Root, Path: i.Path}, program)
	if errors.Is(err, runtimes.ErrNotInstalled) {
		return in, fmt.Errorf("%s is missing: install it (`sudo apt install nodejs npm`)", program)
	}
	return in, err
}

// configured asks the operator's npm for a value of its configuration; empty: none.
func (i *Installer) configured(ctx context.Context, npm, key string) (string, error) {
	cmd := exec.CommandContext(ctx, npm, "config", "get", key)
	cmd.Env, cmd.Dir = i.Environ, "/"
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("npm config get %s: %w", key, err)
	}
	text := strings.TrimSpace(string(out))
	if text == "null" || text == "undefined" {
		text = ""
	}
	return text, nil
}

// prepare puts into the stage what npm needs to find there: a project of its own, and the
// operator's certificate authorities.
func prepare(stage, authorities string) error {
	if err := os.WriteFile(filepath.Join(stage, "workspace/package.json"), []byte(`{"private": true}`+"\n"), 0o600); err != nil {
		return err
	}
	if authorities == "" {
		return nil
	}
	pem, err := os.ReadFile(authorities)
	if err != nil {
		return fmt.Errorf("npm's cafile: %w", err)
	}
	return os.WriteFile(filepath.Join(stage, "tmp", caName), pem, 0o600)
}

// caName is the file of certificate authorities in the private tmp.
const caName = "registry-ca.pem"

// registryURL reads where packages come from.
func registryURL(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || u.Scheme != "https" && u.Scheme != "http" || u.User != nil {
		return nil, errors.New("npm's registry must be an http or https address without a password: see `npm config get registry`")
	}
	return u, nil
}

// ways are the rules that let npm reach the registry. One that the operator's npm names is
// reached also where its addresses are private: those are named one by one.
func ways(ctx context.Context, registry *url.URL) ([]string, error) {
	port := registry.Port()
	if port == "" {
		port = map[string]string{"https": "443", "http": "80"}[registry.Scheme]
	}
	host := registry.Hostname()
	if a, err := netip.ParseAddr(host); err == nil {
		if a.IsLoopback() {
			return nil, fmt.Errorf("npm's registry %s is on the loopback, which the installation cannot reach under that name: use the machine's own address", registry.Host)
		}
		return []string{net.JoinHostPort(a.String(), port)}, nil
	}
	allow := []string{net.JoinHostPort(host, port)}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, fmt.Errorf("npm's registry: %w", err)
	}
	for _, a := range addrs {
		if a = a.Unmap(); a.IsLoopback() {
			continue
		}
		if _, _, special := rules.Special(a); special {
			allow = append(allow, net.JoinHostPort(a.String(), port))
		}
	}
	return allow, nil
}

// stage makes the directories of the one who installs.
func (i *Installer) stage() (string, error) {
	base := filepath.Join(i.Root, "state")
	if err := os.MkdirAll(base, 0o700); err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(base, "install-")
	if err != nil {
		return "", err
	}
	for _, d := range []string{"home", "tmp", "memory", "workspace"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			os.RemoveAll(dir)
			return "", err
		}
	}
	return dir, nil
}

// run runs npm in a boundary of its own.
func (i *Installer) run(ctx context.Context, stage, pkg string, registry *url.URL, allow []string, npm, node runtimes.Installation) error {
	gateway, err := egress.New(egress.Config{Agent: "install", Egress: wire.Egress{Policy: wire.EgressPolicy{Allow: allow}, Proxy: i.Proxy}})
	if err != nil {
		return err
	}
	defer func() { _ = gateway.Close() }()
	set, err := rules.Compile(wire.EgressPolicy{Allow: allow})
	if err != nil {
		return err
	}
	policy := sandbox.Policy{
		Agent: "install", UID: os.Getuid(), GID: os.Getgid(), User: i.User, Home: i.Home, Root: i.Root,
		AgentDir: stage, HomeDir: stage + "/home", TmpDir: stage + "/tmp", MemoryDir: stage + "/memory", Workspace: stage + "/workspace",
		Read: sandbox.ReadSystem, Guest: i.Programs.Guest, Network: sandbox.NetworkAllowlist, DieWithParent: true,
		Expose: slices.Concat(npm.Expose, node.Expose),
	}
	out, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer out.Close()
	path := slices.Concat(npm.PathDirs, node.PathDirs, []string{"/usr/local/bin", "/usr/bin", "/bin"})
	st := launch.Start{
		Launcher: i.Programs.Launcher, Bwrap: i.Programs.Bwrap, Dir: policy.Workspace, Ports: set.Ports(),
		Compile: func() (*sandbox.Plan, error) { return sandbox.Compile(policy, hostfacts.Host{}) },
		Argv: npm.Argv("install", "--no-save", "--no-audit", "--no-fund", "--no-progress", "--no-update-notifier",
			"--omit=dev", "--fetch-retries=3", "--", pkg),
		Env: []string{
			"HOME=" + i.Home, "USER=" + i.User, "LOGNAME=" + i.User, "PATH=" + strings.Join(path, ":"), "LANG=C.UTF-8", "TMPDIR=/tmp",
			"npm_config_registry=" + registry.String(), "npm_config_cache=/tmp/npm",
		},
		Stdout: w, Stderr: w,
	}
	if exists(filepath.Join(stage, "tmp", caName)) {
		st.Env = append(st.Env, "npm_config_cafile=/tmp/"+caName)
	}
	p, err := st.Run(ctx)
	w.Close()
	if err != nil {
		return err
	}
	var serving sync.WaitGroup
	defer serving.Wait()
	defer p.Network.Close()
	defer p.Kill()
	serve, stop := context.WithCancel(ctx)
	defer stop()
	serving.Go(func() { p.Network.Accept(serve, gateway.HandleTCP) })
	serving.Go(func() { _ = gateway.ServeDNS(serve, p.Network.UDP, p.Network.TCP) }) // npm says what it missed
	kill := context.AfterFunc(ctx, p.Kill)
	defer kill()
	said := tailOf(out)
	<-p.Done()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if p.End().Code == 0 {
		return nil
	}
	if wantsLogin().MatchString(said) {
		// Not a matter of handing a token in: scripts of each package would read it there.
		return fmt.Errorf("the registry %s asks for a login, and npm has none behind the boundary, where every package's scripts could read it; "+
			"name one that asks for none (`npm_config_registry=URL agentconnect runtimes install NAME`), or install %s yourself (`npm install -g %s`): agents use what they find in $PATH", registry.Host, pkg, pkg)
	}
	return fmt.Errorf("npm: %s: %s", p.End().Text, said)
}

// wantsLogin is how npm says so; its codes are stable, its words are not.
var wantsLogin = lazyregexp.New(`\b(E401|E403|ENEEDAUTH)\b`)

// tailOf reads to the end and gives the last of it.
func tailOf(r io.Reader) string {
	const most = 2000
	var last []byte
	buf := make([]byte, 4096)
	for {
		n, err := r.Read(buf)
		if last = append(last, buf[:n]...); len(last) > most {
			last = slices.Clone(last[len(last)-most:])
		}
		if err != nil {
			return strings.ToValidUTF8(string(last), "?")
		}
	}
}

// adopt checks what was installed and makes it the one that counts. The version before
// stays: agents that run still use it.
func (i *Installer) adopt(rt runtimes.Runtime, version, from string) error {
	got, err := runtimes.PackageVersion(filepath.Join(from, "node_modules", rt.NPM, "package.json"))
	if err != nil {
		return fmt.Errorf("npm left no %s: %w", rt.NPM, err)
	}
	if got != version {
		return fmt.Errorf("npm brought %s %s and not %s", rt.NPM, got, version)
	}
	found := slices.ContainsFunc(rt.Programs, func(p string) bool {
		_, err := os.Lstat(filepath.Join(from, "node_modules/.bin", p))
		return err == nil
	})
	if !found {
		return fmt.Errorf("%s@%s has no program %s", rt.NPM, version, strings.Join(rt.Programs, " or "))
	}
	dir := i.dir(rt)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	before := i.current(rt)
	to := filepath.Join(dir, version)
	// Of the same version another time: beside it, so that those who run it keep it.
	for n := 2; exists(to); n++ {
		to = filepath.Join(dir, version+"_"+strconv.Itoa(n))
	}
	if err := os.Rename(from, to); err != nil {
		return err
	}
	link := filepath.Join(dir, ".bin.new")
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(filepath.Join(filepath.Base(to), "node_modules/.bin"), link); err != nil {
		return err
	}
	if err := os.Rename(link, filepath.Join(dir, bin)); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if n := e.Name(); n != bin && n != before && n != filepath.Base(to) {
			if err := os.RemoveAll(filepath.Join(dir, n)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Remove takes the installations of rt away. Agents that run it lose it.
func (i *Installer) Remove(rt runtimes.Runtime) error {
	dir := i.dir(rt)
	if !exists(dir) {
		return fmt.Errorf("%s was not installed by `agentconnect runtimes install`", rt.ID)
	}
	return os.RemoveAll(dir)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
