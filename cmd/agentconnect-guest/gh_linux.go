// GitHub's command line with the credentials of one repository.

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

// gh becomes the real gh with GH_TOKEN for the repository that it works on: the one that
// -R, GH_REPO or the checkout's origin names. The token is in the environment of that one
// process and those it starts.
func gh(ctx context.Context, args []string) error {
	path, err := realGH()
	if err != nil {
		return err
	}
	host, repo, err := ghRepo(ctx, args)
	if err != nil {
		return err
	}
	env := os.Environ()
	if repo != "" && os.Getenv("GH_TOKEN") == "" && os.Getenv("GITHUB_TOKEN") == "" {
		reply, err := credential(ctx, wire.CredentialQuery{Action: "get", Protocol: "https", Host: host, Path: repo, Tool: "gh"})
		if err != nil {
			return fmt.Errorf("gh: %w", err)
		}
		name := "GH_TOKEN"
		if host != "github.com" {
			name = "GH_ENTERPRISE_TOKEN"
		}
		env = wire.MergeEnv(env, []string{name + "=" + reply.Password, "GH_HOST=" + host})
	}
	err = unix.Exec(path, append([]string{"gh"}, args...), env)
	return &exitError{exitCannotExec, fmt.Errorf("gh: %s: %w", path, err)}
}

// realGH finds gh on the path, past a link to ourselves.
func realGH() (string, error) {
	self, err := os.Stat("/proc/self/exe")
	if err != nil {
		return "", err
	}
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		path := filepath.Join(dir, "gh")
		st, err := os.Stat(path)
		if err != nil || !filepath.IsAbs(path) || st.IsDir() || st.Mode()&0o111 == 0 || os.SameFile(st, self) {
			continue
		}
		return path, nil
	}
	return "", &exitError{exitNotFound, errors.New("gh: it is not installed where the agent sees it")}
}

// ghRepo says which repository gh is about; empty where it names none.
func ghRepo(ctx context.Context, args []string) (host, repo string, err error) {
	text := os.Getenv("GH_REPO")
	for i, a := range args {
		switch {
		case a == "--":
			args = nil
		case (a == "-R" || a == "--repo") && i+1 < len(args):
			text = args[i+1]
		case strings.HasPrefix(a, "--repo="):
			text = strings.TrimPrefix(a, "--repo=")
		case strings.HasPrefix(a, "-R") && len(a) > 2:
			text = strings.TrimPrefix(a, "-R")
		}
		if args == nil {
			break
		}
	}
	if text == "" {
		out, err := exec.CommandContext(ctx, "git", "config", "--get", "remote.origin.url").Output()
		if err != nil {
			return "", "", nil //nolint:nilerr // no checkout: gh says what it needs
		}
		text = strings.TrimSpace(string(out))
	}
	host, repo = splitRepo(text)
	return host, repo, nil
}

// splitRepo takes OWNER/REPO, HOST/OWNER/REPO or an address apart.
func splitRepo(text string) (host, repo string) {
	if rest, ok := strings.CutPrefix(text, "https://"); ok {
		host, repo, _ = strings.Cut(rest, "/")
		if i := strings.LastIndexByte(host, '@'); i >= 0 {
			host = host[i+1:]
		}
		return host, repo
	}
	if strings.Contains(text, ":") { // git@host:owner/repo, or another protocol
		rest := text[strings.LastIndexByte(text, '@')+1:]
		if h, r, ok := strings.Cut(rest, ":"); ok && !strings.HasPrefix(r, "/") {
			return h, r
		}
		return "", ""
	}
	switch strings.Count(text, "/") {
	case 1:
		return "github.com", text
	case 2:
		host, repo, _ = strings.Cut(text, "/")
		return host, repo
	}
	return "", ""
}
