// The control plane's hand on this daemon: what it places, changes and asks for, judged by
// the local configuration like anything else.

package daemon

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
	"agentconnect.md/sandbox/cmd/internal/placement"
	"agentconnect.md/sandbox/cmd/internal/runtimes"
)

// CredentialName is the systemd credential that may hold the control plane's key.
const CredentialName = "agentconnect-api-key"

// errRestart is the cause of an end that the control plane asked for: whoever keeps the
// daemon running starts it again.
var errRestart = errors.New("restart asked for by the control plane")

// errUnread: an agent of the control plane's whose spec has not come since the daemon
// started. One that runs goes on.
var errUnread = errors.New("the control plane has not said yet how it is configured")

// remote is the connection and what it placed here.
type remote struct {
	d         *Daemon
	log       *slog.Logger // for what the control plane brings about
	placement *placement.Placement
	sessions  *placement.Sessions

	mu      sync.Mutex
	client  *cp.Client
	last    *cp.Client // the one before, with what it still has to tell
	stop    context.CancelFunc
	ended   chan struct{}
	conf    config.ControlPlane
	auth    daemonRecord // of the connection that is made
	status  cp.Status
	secrets map[string]map[string]string // of placed agents, by id

	turns sync.WaitGroup
}

func (d *Daemon) idPath() string { return filepath.Join(d.cfg.Root, "state", "controlplane.json") }

// openRemote reads what an earlier daemon left of a control plane, whether one is
// configured now or not: agents that it placed are not the operator's.
func (d *Daemon) openRemote() (*remote, error) {
	r := &remote{d: d, log: newCalm(d.log), secrets: map[string]map[string]string{}, status: cp.Status{State: cp.StateOff}}
	var err error
	if r.sessions, err = placement.OpenSessions(filepath.Join(d.cfg.Root, "state", "sessions.db")); err != nil {
		return nil, fmt.Errorf("sessions of the control plane: %w; remove the file if it is broken", err)
	}
	r.placement, err = placement.New(placement.Options{
		Host: r, Marks: placement.DirMarks{Agents: filepath.Join(d.cfg.Root, "agents")}, Sessions: r.sessions, Log: r.log,
		MCPServers: func() map[string]json.RawMessage { return d.config().MCPServers },
	})
	if err != nil {
		_ = r.sessions.Close()
		return nil, err
	}
	return r, nil
}

func (d *Daemon) config() *config.Config {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cfg
}

// connect makes the connection what the configuration says; what is wrong with that shows
// in status.
func (d *Daemon) connect(ctx context.Context, asked bool) {
	if err := d.remote.apply(ctx, asked); err != nil {
		d.log.Error("control plane", "error", err)
		d.remote.changed(cp.Status{State: cp.StateRefused, URL: d.config().ControlPlane.URL, Since: time.Now(), LastError: err.Error()})
	}
}

// placedHere reports whether an id is an agent that a control plane placed here.
func (d *Daemon) placedHere(id string) bool {
	return d.remote != nil && d.remote.placement.Has(id)
}

// secretsOf are the secrets that came with a placed agent.
func (r *remote) secretsOf(id string) map[string]string {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.secrets[id]
}

// addTo adds to a status what is the control plane's; state says how an agent is.
func (r *remote) addTo(s *control.Status, state func(id string) Unit) {
	if r == nil {
		return
	}
	s.ControlPlane = r.state()
	for _, p := range r.placement.List() {
		i := slices.IndexFunc(s.Agents, func(a control.AgentStatus) bool { return a.ID == p.ID })
		if i < 0 {
			s.Agents = append(s.Agents, r.d.agentStatus(p.ID, nil, state(p.ID)))
			i = len(s.Agents) - 1
			if !p.Known {
				s.Agents[i].Notes = append(s.Agents[i].Notes, errUnread.Error())
			}
		}
		a := &s.Agents[i]
		a.Notes = append(a.Notes, fmt.Sprintf("placed here by the control plane as %q", printable(p.Name)))
		if p.Refusal != "" && !active(a.State) {
			a.State, a.Reason = control.StateRefused, printable(p.Refusal)
		}
		for _, n := range p.Notes {
			a.Notes = append(a.Notes, printable(n))
		}
		if p.Paused {
			a.Notes = append(a.Notes, "paused at the control plane: it takes no turn of its")
		}
		if p.Moving {
			a.Notes = append(a.Notes, "it moves away from this daemon and takes no turn")
		}
	}
	slices.SortFunc(s.Agents, func(a, b control.AgentStatus) int { return strings.Compare(a.ID, b.ID) })
}

// apply connects, reconnects or disconnects as the configuration says. A key that was refused is
// tried again when somebody asked for it: it may be good now, or its file hold another.
func (r *remote) apply(ctx context.Context, asked bool) error {
	conf := r.d.config().ControlPlane
	r.mu.Lock()
	same := r.stop != nil && conf == r.conf || r.stop == nil && !conf.Enabled
	if asked && r.ended != nil {
		select {
		case <-r.ended:
			same = false
		default:
		}
	}
	r.mu.Unlock()
	if same {
		return nil
	}
	r.disconnect()
	if !conf.Enabled {
		return nil
	}
	endpoint, err := cp.Endpoint(conf.URL, conf.AllowInsecure)
	if err != nil {
		return err
	}
	certs, err := roots(conf.CAFile)
	if err != nil {
		return err
	}
	client := cp.New(cp.Options{
		URL: endpoint, Key: func() (string, error) { return r.key() }, Version: r.d.o.Build, Known: r.d.readDaemonID,
		TLS: &tls.Config{RootCAs: certs, MinVersion: tls.VersionTLS12}, Register: r.register, Facts: r.facts, Load: r.load,
		Handler: r.placement, Taken: r.placement.Taken, Log: r.log, Changed: r.changed, Learned: r.learned, After: r.before(endpoint),
	})
	r.placement.Use(client)
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	r.mu.Lock()
	r.client, r.last, r.stop, r.ended, r.conf = client, nil, stop, ended, conf
	r.mu.Unlock()
	go func() {
		defer close(ended)
		// Why it ended is in its status.
		if err := client.Run(ctx); errors.As(err, new(*cp.KeyRefusedError)) {
			r.mu.Lock()
			r.status.LastError += keyElsewhere(r.d.config().Values())
			r.mu.Unlock()
		}
	}()
	return nil
}

// disconnect ends the connection; what was placed here stays.
func (r *remote) disconnect() {
	r.mu.Lock()
	stop, ended := r.stop, r.ended
	if r.client != nil {
		r.last = r.client
	}
	r.stop, r.client, r.ended = nil, nil, nil
	r.mu.Unlock()
	if stop != nil {
		stop()
		<-ended
	}
}

// before is the client that was connected there before; nil if it was elsewhere.
func (r *remote) before(endpoint string) *cp.Client {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last == nil || r.last.Status().URL != endpoint {
		return nil
	}
	return r.last
}

// close ends the connection and the turns.
func (r *remote) close() {
	r.disconnect()
	r.placement.Close()
	r.turns.Wait()
	if err := r.sessions.Close(); err != nil {
		r.d.log.Error("sessions", "error", err)
	}
}

func roots(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil // the system's
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("controlPlane.caFile: %w", err)
	}
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("controlPlane.caFile: %s holds no certificate in PEM form", file)
	}
	return pool, nil
}

// key finds the key: configuration, then a file, then a credential of the service manager.
func (r *remote) key() (string, error) {
	conf := r.d.config().ControlPlane
	if conf.Key != "" {
		return conf.Key, nil
	}
	path := conf.KeyFile
	if path == "" {
		if dir := getenv(r.d.o.Environ, "CREDENTIALS_DIRECTORY"); dir != "" {
			path = filepath.Join(dir, CredentialName)
		}
	}
	if path == "" {
		return "", errors.New("no key for the control plane; give one with `agentconnect login`")
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("key for the control plane: %w", err)
	}
	key := strings.TrimSpace(string(data))
	if key == "" {
		return "", fmt.Errorf("key for the control plane: %s is empty", path)
	}
	return key, nil
}

// daemonRecord is what is kept of the control plane between runs.
type daemonRecord struct {
	DaemonID string `json:"daemonId"`
	URL      string `json:"url"`
	Key      string `json:"keyDigest,omitempty"` // of the key that the id came with
}

// sameDaemon reports whether both are of one daemon at one control plane, whatever its key.
func (r daemonRecord) sameDaemon(as daemonRecord) bool {
	return r.DaemonID == as.DaemonID && r.URL == as.URL
}

func keyDigest(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// readDaemonID returns the id that this control plane gave us with this key; another one gave none.
func (d *Daemon) readDaemonID(key string) string {
	rec := d.daemonRecord()
	if rec.URL != d.config().ControlPlane.URL || rec.Key != keyDigest(key) || !cp.ValidID(rec.DaemonID) {
		return ""
	}
	return rec.DaemonID
}

// daemonRecord is what was kept; the zero record where that cannot be read.
func (d *Daemon) daemonRecord() (rec daemonRecord) {
	data, err := readState(d.idPath())
	if err != nil || json.Unmarshal(data, &rec) != nil {
		return daemonRecord{}
	}
	return rec
}

// learned hears which daemon this one is there.
func (r *remote) learned(key, id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.auth = daemonRecord{DaemonID: id, URL: r.conf.URL, Key: keyDigest(key)}
}

// local is what this daemon holds of the control plane it registers with. What it holds of another
// one's, or as another daemon, is not that one's to know, and what it does not know it has removed.
func (r *remote) local() cp.LocalState {
	rec := r.d.daemonRecord()
	r.mu.Lock()
	own := rec.sameDaemon(r.auth)
	r.mu.Unlock()
	if !own {
		return cp.LocalState{}
	}
	return r.placement.Local()
}

// keyElsewhere says where the key comes from if it is from where `agentconnect login` does not put it,
// and wins over that.
func keyElsewhere(values []config.Value) string {
	for _, v := range values {
		if v.Key == "controlPlane.key" && (strings.HasPrefix(v.Source, "flag ") || strings.HasPrefix(v.Source, "environment ")) {
			return fmt.Sprintf("; this daemon was started with a key (%s), which counts before the one that login keeps: start it anew without", v.Source)
		}
	}
	return ""
}

func (r *remote) changed(s cp.Status) {
	r.mu.Lock()
	r.status = s
	auth := r.auth
	r.mu.Unlock()
	if s.State != cp.StateReady {
		return
	}
	// Only now: what is held is that daemon's.
	rec := r.d.daemonRecord()
	if rec == auth {
		return
	}
	if !rec.sameDaemon(auth) {
		r.placement.DropFenced()
	}
	if err := writeState(r.d.idPath(), auth); err != nil {
		r.d.log.Error("the daemon's id at the control plane was not kept", "error", err)
	}
}

// State is the connection as status shows it; nil without one.
func (r *remote) state() *control.ControlPlane {
	r.mu.Lock()
	s, client := r.status, r.client
	r.mu.Unlock()
	if client == nil && s.LastError == "" {
		return nil
	}
	out := &control.ControlPlane{
		URL: s.URL, State: string(s.State), Since: s.Since, LastError: printable(s.LastError), NextTry: s.NextTry, DaemonID: s.DaemonID,
	}
	if client != nil {
		out.Waiting = client.Status().Waiting
	}
	return out
}

// localChanged follows a new probe or configuration: what can be done here is told, and what
// was placed here is judged by it.
func (r *remote) localChanged() {
	if r == nil {
		return
	}
	r.mu.Lock()
	client := r.client
	r.mu.Unlock()
	if client != nil {
		client.UpdateCapabilities(r.capabilities())
		client.UpdateFacts()
	}
	r.placement.Judge()
}

func (r *remote) capabilities() cp.Capabilities {
	cfg := r.d.config()
	r.d.mu.Lock()
	works := r.d.probe != nil && r.d.probe.OK
	r.d.mu.Unlock()
	caps := cp.Capabilities{ACP: true, Platforms: []string{}, Features: []string{}}
	if works {
		caps.Features = append(caps.Features, cp.FeatureSandbox)
	}
	if cfg.RequireSandbox {
		caps.Features = append(caps.Features, cp.FeatureSandboxRequired)
	}
	caps.Features = append(caps.Features, cp.FeatureAgentMove, cp.FeatureConfigRevision, cp.FeatureVisibility, cp.FeatureGitLab)
	for _, f := range r.facts().Runtimes {
		caps.Runtimes = append(caps.Runtimes, f.Runtime)
	}
	return caps
}

func (r *remote) register() cp.Register {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return cp.Register{Host: host, Capabilities: r.capabilities(), MaxAgents: r.d.config().MaxAgents, LocalState: r.local()}
}

// facts are the runtimes that could be started here now.
func (r *remote) facts() cp.Facts {
	cfg := r.d.config()
	b := r.d.builder()
	var f cp.Facts
	reg := runtimes.NewRegistry(cfg.Runtimes)
	for _, rt := range reg.All() {
		// What has no start here cannot be offered.
		s, err := b.find(&agent.Agent{ID: "x", Runtime: rt.ID})
		if err != nil {
			continue
		}
		version := cmp.Or(s.install.Version(), "unknown") // the wire wants a word
		if rt.Internal {
			version = r.d.o.Build
		}
		f.Runtimes = append(f.Runtimes, cp.RuntimeFact{Runtime: rt.ID, Version: version, ACPSupport: "full", ToolCalling: true})
	}
	for name, raw := range cfg.MCPServers {
		var s struct {
			Type string `json:"type"`
			URL  string `json:"url"`
		}
		transport := "stdio"
		if json.Unmarshal(raw, &s) == nil && s.URL != "" {
			transport = cmp.Or(s.Type, "http")
		}
		if transport == "stdio" || transport == "http" || transport == "sse" {
			f.MCPServers = append(f.MCPServers, cp.MCPFact{Name: name, Transport: transport})
		}
	}
	slices.SortFunc(f.MCPServers, func(a, b cp.MCPFact) int { return strings.Compare(a.Name, b.Name) })
	return f
}

// load is how the machine is, read when it is asked for.
func (r *remote) load() cp.Heartbeat {
	h := cp.Heartbeat{Health: "ok", ActiveSessions: r.placement.Running()}
	r.d.mu.Lock()
	if r.d.probe == nil || !r.d.probe.OK || r.d.configErr != "" {
		h.Health = "degraded"
	}
	r.d.mu.Unlock()
	h.Load = cp.Load{CPU: cpuLoad(), Mem: memLoad(), Agents: len(r.placement.List())}
	return h
}

// cpuLoad is the load of the last minute for each processor, 0 to 1.
func cpuLoad() float64 {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(data), " ")
	load, err := strconv.ParseFloat(first, 64)
	if err != nil {
		return 0
	}
	return min(max(load/float64(runtime.NumCPU()), 0), 1)
}

// memLoad is the share of memory in use, 0 to 1.
func memLoad() float64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer f.Close()
	got := map[string]float64{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) >= 2 {
			got[strings.TrimSuffix(fields[0], ":")], _ = strconv.ParseFloat(fields[1], 64)
		}
	}
	if got["MemTotal"] == 0 {
		return 0
	}
	return min(max(1-got["MemAvailable"]/got["MemTotal"], 0), 1)
}
