// Package logins carries the login of the daemon's user to a runtime behind the boundary,
// without the directory it lies in, and a refreshed one back. The agent has a copy in its
// private home, so a refresh by rename works there. What comes back is judged: the same account,
// newer, well-formed; nothing else of the agent's ever reaches the host.
//
// It judges by what the files say. Nobody but the provider can tell whose a token is, so an
// agent that forges the account's name beside a token of another account is not found out here;
// docs/boundary.md says what that means.
package logins

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"agentconnect.md/sandbox/cmd/internal/strictjson"
)

// MaxSize bounds a login file, in bytes.
const MaxSize = 64 << 10

// maxAccount bounds the file that names Claude Code's account, in bytes: it keeps much else.
const maxAccount = 16 << 20

// Kind is whose login it is.
type Kind string

const (
	Claude Kind = "claude"
	Codex  Kind = "codex"
)

// File is where the login lies, below a home.
func (k Kind) File() string {
	if k == Claude {
		return ".claude/.credentials.json"
	}
	return ".codex/auth.json"
}

// accountFile names the account beside the login, below a home; empty where the login does.
func (k Kind) accountFile() string {
	if k == Claude {
		return ".claude.json"
	}
	return ""
}

// files are a login and what names its account, as they were read; nil: not there.
type files struct{ login, account []byte }

// errSame: there is nothing to carry back.
var errSame = errors.New("the login is the host's")

// refused says why a login does not go back.
type refused string

func (r refused) Error() string { return string(r) }

// back judges the agent's login beside the host's, and returns the host's file with the
// refreshed part in it. Errors are errSame, or say why it stays inside.
func (k Kind) back(agent, host files, now time.Time) ([]byte, error) {
	if len(agent.login) > MaxSize || len(agent.account) > maxAccount {
		return nil, refused("it is larger than a login is")
	}
	of := codexBack
	if k == Claude {
		of = claudeBack
	}
	merged, err := of(agent, host, now)
	if err == nil && len(merged) > MaxSize {
		return nil, refused("with it the host's file would be larger than a login is") // and count as gone
	}
	return merged, err
}

// forAgent is the part of the host's login that the agent gets.
func (k Kind) forAgent(host []byte) ([]byte, error) {
	members, err := strictjson.Object(host, MaxSize)
	if err != nil {
		return nil, err
	}
	if k == Codex {
		return host, nil
	}
	// Other members are the logins of servers that the user's own Claude Code knows.
	i := slices.IndexFunc(members, func(m strictjson.Member) bool { return m.Key == claudeKey })
	if i < 0 {
		return nil, errors.New("it holds no login")
	}
	return strictjson.Encode(members[i : i+1])
}

const claudeKey = "claudeAiOauth"

// claudeLogin is claudeAiOauth as Claude Code 2.1 writes it.
type claudeLogin struct {
	AccessToken                string   `json:"accessToken"`
	RefreshToken               string   `json:"refreshToken"`
	ExpiresAt                  int64    `json:"expiresAt"` // ms
	RefreshTokenExpiresAt      int64    `json:"refreshTokenExpiresAt,omitempty"`
	Scopes                     []string `json:"scopes"`
	ClientID                   string   `json:"clientId,omitempty"`
	SubscriptionType           string   `json:"subscriptionType,omitempty"`
	SubscriptionTypeSource     string   `json:"subscriptionTypeSource,omitempty"`
	SubscriptionTypeVerifiedAt int64    `json:"subscriptionTypeVerifiedAt,omitempty"`
	RateLimitTier              string   `json:"rateLimitTier,omitempty"`
}

func claudeOf(data []byte) (login claudeLogin, raw json.RawMessage, members []strictjson.Member, err error) {
	members, err = strictjson.Object(data, MaxSize)
	if err != nil {
		return login, nil, nil, err
	}
	i := slices.IndexFunc(members, func(m strictjson.Member) bool { return m.Key == claudeKey })
	if i < 0 {
		return login, nil, nil, errors.New("it holds no login")
	}
	raw = members[i].Value
	return login, raw, members, strictjson.Decode(raw, MaxSize, &login)
}

// claudeAccount names the account of a home: its id and its organization's.
func claudeAccount(data []byte) (string, error) {
	members, err := strictjson.Object(data, maxAccount)
	if err != nil {
		return "", err
	}
	for _, m := range members {
		if m.Key != claudeAccountKey {
			continue
		}
		var a struct {
			AccountUUID      string `json:"accountUuid"`
			OrganizationUUID string `json:"organizationUuid"`
		}
		if err := json.Unmarshal(m.Value, &a); err != nil || a.AccountUUID == "" {
			return "", errors.New("no account is named")
		}
		return a.AccountUUID + "/" + a.OrganizationUUID, nil
	}
	return "", errors.New("no account is named")
}

const claudeAccountKey = "oauthAccount"

func claudeBack(agent, host files, now time.Time) ([]byte, error) {
	theirs, raw, _, err := claudeOf(agent.login)
	if err != nil {
		return nil, refused("it is not the form of a login: " + err.Error())
	}
	ours, _, members, err := claudeOf(host.login)
	if err != nil {
		return nil, refused("the host has no login of that form to replace")
	}
	if theirs.AccessToken == ours.AccessToken && theirs.RefreshToken == ours.RefreshToken {
		return nil, errSame
	}
	mine, err := claudeAccount(host.account)
	if err != nil {
		return nil, refused("the host's account cannot be told: " + err.Error())
	}
	its, err := claudeAccount(agent.account)
	switch {
	case err != nil:
		return nil, refused("its account cannot be told: " + err.Error())
	case its != mine:
		return nil, refused("it is of another account")
	case !sameSet(theirs.Scopes, ours.Scopes) || theirs.SubscriptionType != ours.SubscriptionType || theirs.ClientID != ours.ClientID:
		return nil, refused("it is not the same kind of login")
	case !token(theirs.AccessToken) || !token(theirs.RefreshToken):
		return nil, refused("its tokens are no tokens")
	}
	if why := newer(time.UnixMilli(theirs.ExpiresAt), time.UnixMilli(ours.ExpiresAt), now.Add(lifetime)); why != "" {
		return nil, refused(why)
	}
	for i := range members {
		if members[i].Key == claudeKey {
			members[i].Value = raw
		}
	}
	return strictjson.Encode(members)
}

// lifetime is the longest that an access token may claim to live.
const lifetime = 366 * 24 * time.Hour

func newer(its, ours, latest time.Time) string {
	switch {
	case !its.After(ours):
		return "it is not newer than the host's"
	case its.After(latest):
		return "its time lies too far ahead"
	}
	return ""
}

// token: what a token can look like, whoever made it.
func token(s string) bool {
	return len(s) >= 8 && len(s) <= 16<<10 && !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '"' || r == '\\' })
}

func sameSet(a, b []string) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}

// codexLogin is auth.json as Codex 0.1xx writes it.
type codexLogin struct {
	AuthMode    string       `json:"auth_mode,omitempty"`
	APIKey      string       `json:"OPENAI_API_KEY"`
	Tokens      *codexTokens `json:"tokens"`
	LastRefresh time.Time    `json:"last_refresh"`
}

type codexTokens struct {
	IDToken      string `json:"id_token"`
	AccessToken  string `json:"access_token"`
	RefreshToken string `json:"refresh_token"`
	AccountID    string `json:"account_id,omitempty"`
}

// claims are those of an id token that name its account. The signature is not looked at.
type claims struct {
	Subject string `json:"sub"`
	Issuer  string `json:"iss"`
	Email   string `json:"email"`
	Auth    struct {
		AccountID string `json:"chatgpt_account_id"`
		UserID    string `json:"chatgpt_user_id"`
	} `json:"https://api.openai.com/auth"`
}

func claimsOf(jwt string) (c claims, err error) {
	parts := strings.Split(jwt, ".")
	if len(parts) != 3 {
		return c, errors.New("no id token")
	}
	b, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return c, errors.New("no id token")
	}
	if err := strictjson.Check(b, MaxSize); err != nil {
		return c, err
	}
	if err := json.Unmarshal(b, &c); err != nil || c.Subject == "" {
		return c, errors.New("an id token without its subject")
	}
	return c, nil
}

func codexOf(data []byte) (l codexLogin, c claims, members []strictjson.Member, err error) {
	if err := strictjson.Decode(data, MaxSize, &l); err != nil {
		return l, c, nil, err
	}
	if l.Tokens == nil {
		return l, c, nil, errors.New("it holds no tokens that are refreshed")
	}
	if c, err = claimsOf(l.Tokens.IDToken); err != nil {
		return l, c, nil, err
	}
	members, err = strictjson.Members(data)
	return l, c, members, err
}

func codexBack(agent, host files, now time.Time) ([]byte, error) {
	if string(agent.login) == string(host.login) {
		return nil, errSame // an API key is never refreshed
	}
	theirs, its, from, err := codexOf(agent.login)
	if err != nil {
		return nil, refused("it is not the form of a login: " + err.Error())
	}
	ours, mine, members, err := codexOf(host.login)
	if err != nil {
		return nil, refused("the host has no login of that form to replace")
	}
	switch {
	case *theirs.Tokens == *ours.Tokens:
		return nil, errSame
	case its != mine || theirs.Tokens.AccountID != ours.Tokens.AccountID:
		return nil, refused("it is of another account")
	case theirs.APIKey != ours.APIKey || theirs.AuthMode != ours.AuthMode:
		return nil, refused("it is not the same kind of login")
	case !token(theirs.Tokens.AccessToken) || !token(theirs.Tokens.RefreshToken) || !token(theirs.Tokens.IDToken):
		return nil, refused("its tokens are no tokens")
	}
	if why := newer(theirs.LastRefresh, ours.LastRefresh, now.Add(ahead)); why != "" {
		return nil, refused(why)
	}
	for i := range members {
		for _, m := range from {
			if m.Key == members[i].Key && (m.Key == "tokens" || m.Key == "last_refresh") {
				members[i].Value = m.Value
			}
		}
	}
	return strictjson.Encode(members)
}

// ahead is how far a clock inside may run before ours. It is one machine; a leap second is enough.
const ahead = time.Minute

// accountFor is the agent's account file with the host's account in it.
func accountFor(agent, host []byte) ([]byte, error) {
	theirs, err := strictjson.Object(host, maxAccount)
	if err != nil {
		return nil, fmt.Errorf("the host's: %w", err)
	}
	i := slices.IndexFunc(theirs, func(m strictjson.Member) bool { return m.Key == claudeAccountKey })
	if i < 0 {
		return nil, errors.New("no account is named")
	}
	own, err := strictjson.Object(agent, maxAccount)
	if err != nil {
		own = []strictjson.Member{{Key: "hasCompletedOnboarding", Value: json.RawMessage("true")}}
	}
	if j := slices.IndexFunc(own, func(m strictjson.Member) bool { return m.Key == claudeAccountKey }); j >= 0 {
		own[j].Value = theirs[i].Value
	} else {
		own = append(own, theirs[i])
	}
	return strictjson.Encode(own)
}
