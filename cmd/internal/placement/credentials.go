// Credentials for the repositories that the control plane assigned to an agent: asked for
// when somebody inside asks, held in memory for as long as they are good, written nowhere.

package placement

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
	"agentconnect.md/sandbox/cmd/internal/gitcred"
)

const (
	// grantMargin is how long before its end a token is no longer given.
	grantMargin = time.Minute
	// grantPause is how long the control plane is left alone after it refused for a while,
	// or gave a token that the host is said to refuse.
	grantPause = 30 * time.Second
)

// grant is what is known of one agent's credentials for one repository.
type grant struct {
	mu sync.Mutex // held while the control plane is asked: the others wait for its answer

	username, token string
	until           time.Time // the token is good until then
	refused         error     // not asked for again until the spec changes, or until pause
	pause           time.Time // zero: for good
	rejected        bool      // the host did not take the token
	asked           time.Time
}

// repository is one that the control plane assigned.
type repository struct {
	gitcred.Repo
	fullName string
	provider string // github, gitlab
	id       cp.Digits
}

// repositories are those of a workspace, and what cannot be used of them, in words.
func repositories(w cp.WorkspaceSpec) (list []repository, bad []string) {
	provider, host := "github", "github.com"
	if w.Mode == "gitlab" {
		provider, host = "gitlab", "gitlab.com"
	}
	add := func(address string, id cp.Digits) gitcred.Repo {
		u, err := url.Parse(address)
		var r gitcred.Repo
		if err == nil {
			r, err = gitcred.Parse(u.Scheme, u.Host, u.Path)
		}
		switch {
		case err == nil && u.User != nil:
			err = errors.New("the address holds a user or a password")
		case err == nil && (u.RawQuery != "" || u.Fragment != ""):
			err = errors.New("it has more than a host and a path")
		}
		if err != nil {
			bad = append(bad, fmt.Sprintf("repository %.80q cannot be used: %v", withoutSecrets(address), bare(err)))
			return r
		}
		list = append(list, repository{Repo: r, fullName: r.Path, provider: provider, id: id})
		return r
	}
	if w.Mode == "github" || w.Mode == "gitlab" {
		if r := add(w.GitRepo, w.ProjectID); r.Host != "" {
			host = r.Host
		}
	}
	for _, more := range w.AdditionalRepos {
		add("https://"+host+"/"+more.RepoFullName, more.RepoID)
	}
	return list, bad
}

// withoutSecrets is an address as it may be logged and shown: people write passwords into them.
func withoutSecrets(address string) string {
	if !strings.Contains(address, "://") {
		return address
	}
	u, err := url.Parse(address)
	if err != nil {
		return "…"
	}
	u.User, u.RawQuery, u.Fragment = nil, "", ""
	return u.String()
}

// bare is why an address cannot be read, without the address.
func bare(err error) error {
	if errors.As(err, new(*url.Error)) {
		return errors.New("it is no address")
	}
	return err
}

// Credential gives what git needs for a repository that is assigned to the agent.
func (p *Placement) Credential(ctx context.Context, id string, repo gitcred.Repo) (username, token string, err error) {
	uuid, r, g, err := p.grantOf(id, repo)
	if err != nil {
		return "", "", err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := p.o.Now()
	again := g.rejected && now.Sub(g.asked) >= grantPause
	switch {
	case g.refused != nil && (g.pause.IsZero() || now.Before(g.pause)):
		return "", "", g.refused
	case g.token != "" && now.Before(g.until) && !again:
		return g.username, g.token, nil
	}
	q := cp.CredentialRequest{AgentID: uuid, Reason: "helper", RepoFullName: r.fullName, ForceRefresh: again}
	if r.provider != "github" {
		if !p.offered(cp.FeatureProvider) {
			return "", "", fmt.Errorf("the control plane gives no credentials for %s", r.provider)
		}
		q.Provider, q.ExternalRepoID = r.provider, string(r.id)
	}
	g.username, g.token, g.refused, g.pause, g.rejected, g.asked = "", "", nil, time.Time{}, false, now
	e, err := p.reporter().AskOnce(ctx, "gitcred/request", q)
	var fe *cp.FrameError
	switch {
	case errors.As(err, &fe):
		g.refused = fmt.Errorf("the control plane gives no credentials: %s (%s)", cut(fe.Message, 300), cut(string(fe.Code), 40))
		if fe.Code != cp.CodeScopeDenied {
			g.pause = now.Add(grantPause)
		}
		return "", "", g.refused
	case err != nil:
		return "", "", err
	case e.Type != "gitcred/grant":
		return "", "", fmt.Errorf("gitcred/request was answered with %.40q", e.Type)
	}
	var got cp.CredentialGrant
	if fe := cp.Decode(e.Payload, &got); fe != nil {
		return "", "", fe
	}
	if err := r.matches(got); err != nil {
		return "", "", err
	}
	g.username, g.token = got.Username, got.Token
	ttl := time.Duration(min(got.TTLSec, 24*60*60)) * time.Second
	g.until = now.Add(ttl - min(grantMargin, ttl/10))
	return g.username, g.token, nil
}

// matches compares a grant with what was asked for.
func (r repository) matches(g cp.CredentialGrant) error {
	named, err := gitcred.Parse("https", r.Host, g.RepoFullName)
	switch {
	case err != nil || !r.Covers(named):
		return errors.New("the control plane answered for another repository")
	case g.Provider != "" && g.Provider != r.provider, g.ExternalRepoID != "" && r.id != "" && g.ExternalRepoID != r.id:
		return errors.New("the control plane answered for another provider's repository")
	}
	return gitcred.CheckAnswer(g.Username, g.Token)
}

// Rejected notes that a host did not take what was given: the next one asked for is fresh.
func (p *Placement) Rejected(id string, repo gitcred.Repo) {
	_, _, g, err := p.grantOf(id, repo)
	if err != nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.rejected = true
}

// grantOf finds the repository among those that are assigned to the agent now.
func (p *Placement) grantOf(id string, repo gitcred.Repo) (uuid string, r repository, g *grant, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var a *placed
	for _, one := range p.agents {
		if one.id == id {
			a = one
		}
	}
	switch {
	case a == nil:
		return "", r, nil, errGone
	case a.moveID != "":
		return "", r, nil, errMoving
	case !a.known:
		return "", r, nil, errUnread
	case a.refusal != "":
		return "", r, nil, errors.New(a.refusal)
	case p.reporter() == nil:
		return "", r, nil, cp.ErrNotConnected
	}
	list, _ := repositories(a.spec.Workspace.V)
	i := slices.IndexFunc(list, func(one repository) bool { return one.Covers(repo) })
	if i < 0 {
		return "", r, nil, fmt.Errorf("%s is not assigned to this agent", repo)
	}
	r = list[i]
	if a.grants == nil {
		a.grants = map[gitcred.Repo]*grant{}
	}
	if a.grants[r.Repo] == nil {
		a.grants[r.Repo] = &grant{}
	}
	return a.uuid, r, a.grants[r.Repo], nil
}

func (p *Placement) offered(feature string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Contains(p.offers, feature)
}
