// Package gitclone makes what an agent in clone mode works with: a bare repository of ours
// in the agent's directory, and the agent's own clone of it. git of the host runs in the
// operator's repository and in the bare one, and never in the clone: the agent writes that.
// The bare one takes in what the agent pushes by way of the supervisor, behind a boundary;
// this package says what its refs are, and starts nothing there.
package gitclone

import (
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// scpLike is USER@HOST:PATH. Without a user it could be taken for a path.
var scpLike = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]*@[A-Za-z0-9][A-Za-z0-9.-]*:[^-:].*$`)
})

// schemes are the transports that a source may name. All others run programs by what the
// address says (ext::), or are another word for a path.
var schemes = []string{"https", "http", "ssh", "git"}

// IsURL reports whether a source is an address and not a path.
func IsURL(source string) bool {
	return !filepath.IsAbs(source) && (strings.Contains(source, "://") || scpLike().MatchString(source))
}

// CheckSource says what is wrong with a repository's address or its absolute path.
func CheckSource(source string) error {
	switch {
	case filepath.IsAbs(source):
		if filepath.Clean(source) != source {
			return fmt.Errorf("%q: write it as %q", source, filepath.Clean(source))
		}
		return nil
	case strings.Contains(source, "://"):
		u, err := url.Parse(source)
		switch {
		case err != nil:
			return errors.New("it is no address") // the error would repeat a password
		case u.User != nil && (u.Scheme != "ssh" || hasPassword(u)):
			return errors.New("the address holds a user or a password: let git's credential helper give them")
		case !slices.Contains(schemes, u.Scheme) || u.Hostname() == "" || strings.HasPrefix(u.Hostname(), "-"):
			return fmt.Errorf("%q: write https://HOST/PATH, ssh://USER@HOST/PATH, USER@HOST:PATH or the absolute path of a repository", source)
		}
		return nil
	case scpLike().MatchString(source):
		return nil
	}
	return fmt.Errorf("%q: write https://HOST/PATH, ssh://USER@HOST/PATH, USER@HOST:PATH or the absolute path of a repository", source)
}

func hasPassword(u *url.URL) bool {
	_, has := u.User.Password()
	return has
}
