package placement

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
	"agentconnect.md/sandbox/cmd/internal/controlplane/cptest"
	"agentconnect.md/sandbox/cmd/internal/gitcred"
)

// purse answers gitcred/request as a test says.
type purse struct {
	mu     sync.Mutex
	asked  []cp.CredentialRequest
	answer func(cp.CredentialRequest) (string, any)
}

func (p *purse) on(s *cptest.Server) {
	s.OnRequest(func(e cp.Envelope) (string, any, bool) {
		if e.Type != "gitcred/request" {
			return "ack", cp.Ack{OK: true}, true
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		var q cp.CredentialRequest
		if err := json.Unmarshal(e.Payload, &q); err != nil {
			return "error", cp.FrameError{Code: cp.CodeBadPayload, Message: err.Error()}, true
		}
		p.asked = append(p.asked, q)
		typ, payload := p.answer(q)
		return typ, payload, true
	})
}

func (p *purse) set(f func(cp.CredentialRequest) (string, any)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answer = f
}

func (p *purse) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.asked)
}

func (p *purse) last() cp.CredentialRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked[len(p.asked)-1]
}

// granted answers with a token of its own each time.
func (p *purse) granted(q cp.CredentialRequest) (string, any) {
	return "gitcred/grant", map[string]any{
		"username": "x-access-token", "token": fmt.Sprintf("token-%d", len(p.asked)), "ttlSec": 600, "expiresAt": cp.Stamp(time.Now()),
		"repoFullName": q.RepoFullName, "access": "write",
	}
}

func repo(t *testing.T, address string) gitcred.Repo {
	t.Helper()
	r, err := gitcred.ParseRule(address)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestCredentialsAreAskedForWhatTheControlPlaneAssigned(t *testing.T) {
	s := cptest.New(t)
	var p purse
	p.set(p.granted)
	p.on(s)
	d := newDaemon(t, s.URL(), quick)
	var clock sync.Mutex
	now := time.Now()
	d.p.mu.Lock()
	d.p.o.Now = func() time.Time { clock.Lock(); defer clock.Unlock(); return now }
	d.p.mu.Unlock()
	pass := func(by time.Duration) { clock.Lock(); defer clock.Unlock(); now = now.Add(by) }
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid := cp.NewID()
	work := map[string]any{"mode": "scratch", "isolation": "shared", "additionalRepos": []any{map[string]any{"repoFullName": "acme/app", "repoId": 42}, map[string]any{"repoFullName": "../evil"}}}
	upsert(t, ctx, c, spec(uuid, "a", "1", map[string]any{"workspace": work}))
	conf := d.host.agents["a"]
	if len(conf.GitCredentials) != 1 || conf.GitCredentials[0].URL != "https://github.com/acme/app" || !conf.GitCredentials[0].ControlPlane || conf.Validate() != nil {
		t.Errorf("the agent's rules are %+v: %v", conf.GitCredentials, conf.Validate())
	}
	app := repo(t, "https://github.com/Acme/App")
	get := func() string {
		t.Helper()
		user, token, err := d.p.Credential(ctx, "a", app)
		if err != nil || user != "x-access-token" {
			t.Fatalf("%q %q %v", user, token, err)
		}
		return token
	}
	refused := func(r gitcred.Repo, word string, asks int) {
		t.Helper()
		before := p.count()
		if _, token, err := d.p.Credential(ctx, "a", r); err == nil || token != "" || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %q %v, want %q", r, token, err, word)
		}
		if n := p.count() - before; n != asks {
			t.Errorf("%s: the control plane was asked %d times, want %d", r, n, asks)
		}
	}
	if got := get(); got != "token-1" {
		t.Errorf("got %q", got)
	}
	if q := p.last(); q.AgentID != uuid || q.RepoFullName != "acme/app" || q.Provider != "" || q.ForceRefresh {
		t.Errorf("asked with %+v", q)
	}
	if get() != "token-1" || p.count() != 1 {
		t.Error("a token that is good was asked for again")
	}
	pass(545 * time.Second)
	if get() != "token-2" {
		t.Error("a token was given that is about to end")
	}
	// One that the host refuses is replaced, but not as often as somebody inside says so.
	d.p.Rejected("a", app)
	if get() != "token-2" {
		t.Error("the control plane was asked at once")
	}
	pass(grantPause)
	if get() != "token-3" || !p.last().ForceRefresh {
		t.Error("no fresh one was asked for")
	}
	refused(repo(t, "https://github.com/acme/other"), "not assigned", 0)
	refused(repo(t, "https://evil.example/acme/app"), "not assigned", 0)
	refused(repo(t, "https://github.com/acme/app/*"), "not assigned", 0)

	// What the control plane answers is compared with what was asked.
	pass(time.Hour)
	for word, answer := range map[string]map[string]any{
		"another repository": {"username": "u", "token": "t", "ttlSec": 60, "repoFullName": "acme/other"},
		"another provider":   {"username": "u", "token": "t", "ttlSec": 60, "repoFullName": "acme/app", "provider": "gitlab"},
		"line break":         {"username": "u", "token": "t\nhost=evil", "ttlSec": 60, "repoFullName": "acme/app"},
		"ttlSec":             {"username": "u", "token": "t", "ttlSec": 0, "repoFullName": "acme/app"},
	} {
		p.set(func(cp.CredentialRequest) (string, any) { return "gitcred/grant", answer })
		refused(app, word, 1)
	}
	p.set(func(cp.CredentialRequest) (string, any) { return "ack", cp.Ack{OK: true} })
	refused(app, "answered with", 1)
	// A refusal for now holds for a moment, one for good until the spec changes.
	p.set(func(cp.CredentialRequest) (string, any) {
		return "error", cp.FrameError{Code: cp.CodeRateLimited, Message: "slowly", Retryable: true}
	})
	refused(app, "slowly", 1)
	refused(app, "slowly", 0)
	pass(grantPause)
	p.set(func(cp.CredentialRequest) (string, any) {
		return "error", cp.FrameError{Code: cp.CodeScopeDenied, Message: "not enabled"}
	})
	refused(app, "not enabled", 1)
	pass(24 * time.Hour)
	refused(app, "not enabled", 0)
	p.set(p.granted)
	upsert(t, ctx, c, spec(uuid, "a", "2", map[string]any{"workspace": work}))
	get()
	// What is no longer assigned is no longer given.
	upsert(t, ctx, c, spec(uuid, "a", "3", map[string]any{"workspace": map[string]any{"mode": "scratch"}}))
	refused(app, "not assigned", 0)
	if _, _, err := d.p.Credential(ctx, "b", app); err == nil {
		t.Error("an agent that is not placed here got credentials")
	}
	if f := s.Faults(); len(f) > 0 {
		t.Error(f)
	}
}

func TestCredentialsOfAnotherProviderNeedTheControlPlanesWord(t *testing.T) {
	s := cptest.New(t)
	s.Member("serverFeatures", []string{})
	var p purse
	p.set(p.granted)
	p.on(s)
	d := newDaemon(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid := cp.NewID()
	work := map[string]any{"mode": "gitlab", "gitRepo": "https://gitlab.com/group/sub/app.git", "branch": "main", "projectId": "77"}
	upsert(t, ctx, c, spec(uuid, "a", "1", map[string]any{"workspace": work}))
	app := repo(t, "https://gitlab.com/group/sub/app")
	if _, _, err := d.p.Credential(ctx, "a", app); err == nil || p.count() != 0 {
		t.Errorf("asked %d times: %v", p.count(), err)
	}
	s.Member("serverFeatures", []string{cp.FeatureProvider})
	n := s.Conns()
	s.Drop()
	s.Until(ctx, "a new connection", func() bool { return s.Conns() > n })
	c = s.Ready(ctx)
	upsert(t, ctx, c, spec(uuid, "a", "2", map[string]any{"workspace": work}))
	if _, _, err := d.p.Credential(ctx, "a", app); err != nil {
		t.Fatal(err)
	}
	if q := p.last(); q.Provider != "gitlab" || q.ExternalRepoID != "77" || q.RepoFullName != "group/sub/app" {
		t.Errorf("asked with %+v", q)
	}
}
