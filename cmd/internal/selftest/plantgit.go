package selftest

import (
	"errors"
	"os"
	"path/filepath"
)

// gitDirs are the git directories of the planted repositories, below their folder.
var gitDirs = []string{".git", "nested/.git", ".git/modules/sub", "bare.git"}

// PlantGit makes repositories of every kind in the folder dir, which must not exist, as git
// would: one with a nested one, a submodule, a linked worktree and a bare one, and settings
// that the host's programs trust. It runs no git.
func PlantGit(dir string) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	config := "[core]\n\trepositoryformatversion = 0\n"
	files := map[string]string{
		".git/config":                     config + "[include]\n\tpath = ../shared.gitconfig\n",
		".git/config.worktree":            "",
		"shared.gitconfig":                "",
		"nested/.git/config":              config + "\thooksPath = .husky\n",
		"nested/.husky/keep":              "",
		"sub/.git":                        "gitdir: ../.git/modules/sub\n",
		".git/modules/sub/config":         config + "\tworktree = ../../../sub\n",
		"linked/.git":                     "gitdir: " + filepath.Join(dir, ".git/worktrees/linked") + "\n",
		".git/worktrees/linked/HEAD":      "ref: refs/heads/linked\n",
		".git/worktrees/linked/commondir": "../..\n",
		".git/worktrees/linked/gitdir":    filepath.Join(dir, "linked/.git") + "\n",
		"bare.git/config":                 config + "\tbare = true\n",
		".vscode/settings.json":           "{}\n",
		".claude/settings.json":           "{}\n",
	}
	for _, g := range gitDirs {
		for _, d := range []string{"objects/info", "refs/heads", "hooks", "info"} {
			if err := os.MkdirAll(filepath.Join(dir, g, d), 0o700); err != nil {
				return err
			}
		}
		files[g+"/HEAD"] = "ref: refs/heads/main\n"
		files[g+"/info/attributes"] = ""
	}
	var err error
	for name, text := range files {
		path := filepath.Join(dir, name)
		err = errors.Join(err, os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600))
	}
	return err
}
