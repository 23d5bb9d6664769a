package logins

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

var now = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

type object = map[string]any

func text(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

func claudeFile(tag string, expires time.Time, change ...func(object)) []byte {
	o := object{"accessToken": "sk-ant-oat01-" + tag, "refreshToken": "sk-ant-ort01-" + tag, "expiresAt": expires.UnixMilli(), "scopes": []string{"user:inference", "user:profile"}, "subscriptionType": "max", "rateLimitTier": nil}
	for _, c := range change {
		c(o)
	}
	return text(object{claudeKey: o})
}

func claudeJSON(id string) []byte {
	return text(object{"numStartups": 3, claudeAccountKey: object{"accountUuid": id, "organizationUuid": "org", "emailAddress": "a@b.c"}})
}

func jwt(sub string, more ...string) string {
	part := base64.RawURLEncoding.EncodeToString
	return part([]byte(`{"alg":"none"}`)) + "." + part(text(object{"sub": sub, "iss": "https://auth.openai.com", "iat": len(more), "https://api.openai.com/auth": object{"chatgpt_account_id": "acc"}})) + ".sig" + strings.Join(more, "")
}

func codexFile(tag, sub string, at time.Time, change ...func(object)) []byte {
	o := object{"auth_mode": "chatgpt", "OPENAI_API_KEY": nil, "tokens": object{"id_token": jwt(sub, tag), "access_token": "access-" + tag, "refresh_token": "refresh-" + tag, "account_id": "acc"}, "last_refresh": at.Format(time.RFC3339Nano)}
	for _, c := range change {
		c(o)
	}
	return text(o)
}

// hostOf is what the host has, agentOf what a refresh inside makes of it.
func hostOf(k Kind) files {
	if k == Claude {
		b := claudeFile("old", now)
		var o object
		if err := json.Unmarshal(b, &o); err != nil {
			panic(err)
		}
		o["mcpOAuth"] = object{"server": "its token"}
		return files{login: text(o), account: claudeJSON("me")}
	}
	return files{login: codexFile("old-", "me", now)}
}

func agentOf(k Kind, change ...func(object)) files {
	if k == Claude {
		return files{login: claudeFile("new", now.Add(8*time.Hour), change...), account: claudeJSON("me")}
	}
	return files{login: codexFile("new-", "me", now.Add(time.Second), change...)}
}

func TestARefreshGoesBackAndNothingElseOfTheFileDoes(t *testing.T) {
	for _, k := range []Kind{Claude, Codex} {
		t.Run(string(k), func(t *testing.T) {
			merged, err := k.back(agentOf(k), hostOf(k), now.Add(time.Minute))
			if err != nil {
				t.Fatal(err)
			}
			s := string(merged)
			if strings.Contains(s, "old") || !strings.Contains(s, "new") {
				t.Errorf("the host would have %s", s)
			}
			if k == Claude && !strings.Contains(s, "its token") {
				t.Errorf("the host's other logins are lost: %s", s)
			}
			// And once there, it is the same.
			host := hostOf(k)
			host.login = merged
			if _, err := k.back(agentOf(k), host, now.Add(time.Minute)); !errors.Is(err, errSame) {
				t.Errorf("the second time: %v", err)
			}
			if k == Claude {
				given, err := k.forAgent(hostOf(k).login)
				if err != nil || strings.Contains(string(given), "its token") {
					t.Errorf("the agent gets %s %v", given, err)
				}
			}
		})
	}
}

func TestWhatAnAgentPlantsNeverGoesBack(t *testing.T) {
	set := func(k string, v any) func(object) { return func(o object) { o[k] = v } }
	inTokens := func(k string, v any) func(object) { return func(o object) { o["tokens"].(object)[k] = v } }
	type c struct {
		kind  Kind
		name  string
		agent files
	}
	other := agentOf(Claude)
	other.account = claudeJSON("somebody")
	noAccount := agentOf(Claude)
	noAccount.account = nil
	// As large as a login may be; with what else the host has in its file it would be larger.
	room := MaxSize - len(agentOf(Claude, set("rateLimitTier", "")).login)
	large := agentOf(Claude, set("rateLimitTier", strings.Repeat("a", room)))
	cases := []c{
		{Claude, "too large for the host's file", large},
		{Claude, "another account", other},
		{Claude, "no account", noAccount},
		{Claude, "account twice", files{agentOf(Claude).login, []byte(`{"oauthAccount":{"accountUuid":"me","organizationUuid":"org"},"oauthAccount":{"accountUuid":"x"}}`)}},
		{Claude, "older", files{claudeFile("new", now.Add(-time.Hour)), claudeJSON("me")}},
		{Claude, "as old", files{claudeFile("new", now), claudeJSON("me")}},
		{Claude, "from the far future", files{claudeFile("new", now.Add(3*lifetime)), claudeJSON("me")}},
		{Claude, "other scopes", agentOf(Claude, set("scopes", []string{"user:inference"}))},
		{Claude, "another plan", agentOf(Claude, set("subscriptionType", "free"))},
		{Claude, "an unknown key", agentOf(Claude, set("helper", "/bin/sh"))},
		{Claude, "no token", agentOf(Claude, set("accessToken", ""))},
		{Claude, "a cleared login", agentOf(Claude, set("refreshToken", ""))},
		{Claude, "a token with a newline", agentOf(Claude, set("accessToken", "sk-ant-oat01\nX-Header: y"))},
		{Claude, "a number for a token", agentOf(Claude, set("accessToken", 1))},
		{Claude, "a huge token", agentOf(Claude, set("accessToken", strings.Repeat("a", 20<<10)))},
		{Claude, "a huge file", files{[]byte(strings.Repeat(" ", MaxSize+1)), claudeJSON("me")}},
		{Claude, "cut", files{agentOf(Claude).login[:40], claudeJSON("me")}},
		{Claude, "twice", files{[]byte(`{"claudeAiOauth":{},"claudeAiOauth":{}}`), claudeJSON("me")}},
		{Claude, "text", files{[]byte("planted"), claudeJSON("me")}},
		{Codex, "another account", files{login: codexFile("new-", "somebody", now.Add(time.Second))}},
		{Codex, "another workspace", agentOf(Codex, inTokens("account_id", "acc2"))},
		{Codex, "an API key", agentOf(Codex, set("OPENAI_API_KEY", "sk-mine"))},
		{Codex, "another mode", agentOf(Codex, set("auth_mode", "apikey"))},
		{Codex, "no id token", agentOf(Codex, inTokens("id_token", "x"))},
		{Codex, "no refresh token", agentOf(Codex, inTokens("refresh_token", ""))},
		{Codex, "an unknown key", agentOf(Codex, set("command", "sh"))},
		{Codex, "an unknown key among the tokens", agentOf(Codex, inTokens("command", "sh"))},
		{Codex, "older", files{login: codexFile("new-", "me", now.Add(-time.Hour))}},
		{Codex, "from the future", files{login: codexFile("new-", "me", now.Add(time.Hour))}},
		{Codex, "no tokens", agentOf(Codex, set("tokens", nil))},
		{Codex, "text", files{login: []byte("planted")}},
	}
	for _, c := range cases {
		t.Run(fmt.Sprintf("%s %s", c.kind, c.name), func(t *testing.T) {
			merged, err := c.kind.back(c.agent, hostOf(c.kind), now.Add(time.Minute))
			var why refused
			if merged != nil || !errors.As(err, &why) {
				t.Errorf("%s %v", merged, err)
			}
			t.Log(err)
		})
	}
}

// Whatever an agent leaves there, the host's file is a login of the same account, or untouched.
func FuzzBack(f *testing.F) {
	for _, k := range []Kind{Claude, Codex} {
		a := agentOf(k)
		f.Add(k == Claude, a.login, a.account)
		f.Add(k == Claude, hostOf(k).login, hostOf(k).account)
	}
	f.Add(true, []byte(`{"claudeAiOauth":{"accessToken":"x"}}`), []byte(`{}`))
	f.Fuzz(func(t *testing.T, claude bool, login, account []byte) {
		k := Codex
		if claude {
			k = Claude
		}
		host := hostOf(k)
		merged, err := k.back(files{login, account}, host, now.Add(time.Minute))
		if err != nil {
			if merged != nil {
				t.Fatal("an error and a file")
			}
			return
		}
		if len(merged) > 2*MaxSize {
			t.Fatalf("%d bytes", len(merged))
		}
		if k == Claude {
			l, _, members, err := claudeOf(merged)
			if err != nil || !token(l.AccessToken) || !token(l.RefreshToken) || l.ExpiresAt <= now.UnixMilli() || len(members) != 2 {
				t.Fatalf("%s %v", merged, err)
			}
			if id, err := claudeAccount(account); err != nil || id != "me/org" {
				t.Fatalf("account %q %v", id, err)
			}
			return
		}
		l, c, _, err := codexOf(merged)
		if err != nil || c.Subject != "me" || l.Tokens.AccountID != "acc" || l.APIKey != "" || !l.LastRefresh.After(now) {
			t.Fatalf("%s %v", merged, err)
		}
	})
}
