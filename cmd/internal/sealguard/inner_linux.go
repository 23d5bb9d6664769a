// Links in git directories. git on the host writes to files there by name, or removes them, and
// follows a link of that name, so one that the agent makes would have the host do that where the
// agent cannot. No mount forbids a new name: links are taken away as they appear.

package sealguard

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/sandbox/gitseal"
	"agentconnect.md/sandbox/sandbox/pathfd"
)

// Whoever does again and again what the guard undoes is met by a command of the host sooner or
// later, in the milliseconds between. So it may only so often.
const (
	maxHostile    = 4  // in all: what no tool does
	maxPersisting = 20 // in a while: what one may do unasked
	persisting    = time.Minute
	// maxMade bounds the folders that an agent makes there: each is looked at and watched, which
	// costs the guard time and the user's other programs their watches.
	maxMade = 8192
)

// looks is how often a folder is looked at that cannot be watched: another agent may have it renamed
// just then.
const looks = 16

// inner are the folders of git directories in which links are looked for.
type inner struct {
	tops  map[string]gitseal.Role // those that were told
	dirs  map[string]gitseal.Role // these and those in them
	links map[string]bool         // links that the host made
	// fresh are names that came since the last look, and what a folder of that name is; all: any
	// may have.
	fresh map[string]gitseal.Role
	all   bool
	most  int // folders that there may be
}

// Inside watches folders of git's for links, but for those in links, which were there before
// anything of the agent ran. It is told once. An error means that they cannot be watched.
func (g *Guard) Inside(folders map[string]gitseal.Role, links map[string]bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.inner.links != nil {
		return nil
	}
	g.inner.tops, g.inner.links = folders, links
	var found []string
	for dir, role := range folders {
		var links, blind []string
		for range looks {
			if links, blind = g.enter(dir, role); len(blind) == 0 {
				break
			}
		}
		if len(blind) > 0 {
			g.inner.links = nil // the next start asks again
			return fmt.Errorf("%s: git on the host writes there, and it cannot be watched for links: too many or too deep folders, or not to be listed", blind[0])
		}
		found = append(found, links...)
	}
	g.inner.most = len(g.inner.dirs) + maxMade
	g.unlink(found)
	return nil
}

// enter watches a folder and those below it, and gives the links that must not be there and the
// folders that may hold some and cannot be watched.
func (g *Guard) enter(dir string, role gitseal.Role) (links, blind []string) {
	first := gitseal.Inner(dir, role)
	if blind = first.Blind; len(first.Folders) == 0 {
		return nil, blind
	}
	for _, f := range first.Folders {
		g.lookAgain(f.Path)
		g.inner.dirs[f.Path] = f.Role
	}
	now := gitseal.Inner(dir, role) // what came since the list was made
	for _, f := range now.Folders {
		if _, watched := g.dirs[f.Path]; !watched && !g.full && slices.Contains(first.Folders, f) {
			blind = append(blind, f.Path)
		}
	}
	return slices.DeleteFunc(now.Links, func(l string) bool { return g.inner.links[l] }), append(blind, now.Blind...)
}

// lookAgain watches what stands at a path now, whatever was watched there before.
func (g *Guard) lookAgain(dir string) {
	delete(g.dirs, dir)
	g.look(dir)
}

// came takes note of a name in a watched folder.
func (i *inner) came(dir, name string, mask uint32) {
	in, ok := i.dirs[dir]
	role, look := in.Below(name)
	if ok && mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0 && (look || mask&unix.IN_ISDIR == 0) {
		i.fresh[dir+"/"+name] = role
	}
}

// checkInner looks at the names that came. The lock is held.
func (g *Guard) checkInner() {
	var links, blind, remotes, lists []string
	enter := func(dir string, role gitseal.Role) {
		l, b := g.enter(dir, role)
		links, blind = append(links, l...), append(blind, b...)
	}
	hidden := 0
	for path, role := range g.inner.fresh {
		st, err := g.place.stat(path)
		switch {
		case errors.Is(err, unix.EACCES): // a folder above was made one that nobody may enter
			hidden++
			g.inner.all = true
		case err != nil:
		case st.Mode&unix.S_IFMT == unix.S_IFDIR:
			delete(g.inner.dirs, path) // another one, perhaps
			enter(path, role)
		case st.Mode&unix.S_IFMT == unix.S_IFLNK && !g.inner.links[path]:
			links = append(links, path)
		case st.Mode&unix.S_IFMT == unix.S_IFREG && g.inner.remote(path):
			remotes = append(remotes, path)
		case !g.absent[path] && g.inner.conflicts(path): // of a linked worktree that is new
			if at := g.came(path); at != "" {
				lists = append(lists, at)
			}
		}
	}
	if g.inner.all {
		for dir, role := range g.inner.tops {
			enter(dir, role)
		}
	}
	g.inner.fresh, g.inner.all = map[string]gitseal.Role{}, false
	g.unlink(links)
	if len(lists) > 0 {
		g.still(func() {
			for _, path := range lists {
				g.setAside(path)
			}
		})
		g.persists(lists, nil)
	}
	if len(remotes) > 0 {
		g.still(func() {
			for _, path := range remotes {
				g.setAside(path)
			}
		})
		g.hostile("made "+remotes[0]+", which git on the host would obey", len(remotes))
	}
	switch {
	case len(g.boxes) == 0:
	case len(blind) > 0:
		g.stop(fmt.Sprintf("%s cannot be watched for links, and git on the host writes there", blind[0]))
	case len(g.inner.dirs) > g.inner.most:
		g.stop(fmt.Sprintf("it made more than %d folders where git on the host writes", maxMade))
	case hidden > 0:
		g.hostile("hid names where git on the host writes", hidden)
	}
}

// remote reports whether git on the host would take an address from the file at path.
func (i *inner) remote(path string) bool {
	dir, name := filepath.Split(path)
	return filepath.Base(dir) == gitseal.Branches && i.dirs[filepath.Dir(filepath.Clean(dir))] == gitseal.GitDir && !strings.Contains(name, ".set-aside-")
}

// conflicts reports whether a path is git's list of conflicts.
func (i *inner) conflicts(path string) bool {
	return filepath.Base(path) == gitseal.ConflictsFile && i.dirs[filepath.Dir(path)] == gitseal.GitDir
}

// unlink takes links away.
func (g *Guard) unlink(links []string) {
	if len(links) == 0 {
		return
	}
	slices.Sort(links)
	links = slices.Compact(links)
	g.still(func() {
		for _, path := range links {
			to := linkText(g.place.root, path)
			if err := gitseal.RemoveLink(g.place.root, path); err != nil {
				if _, serr := g.place.stat(path); serr == nil || errors.Is(serr, unix.EACCES) {
					g.stop(fmt.Sprintf("%s is a link where git on the host writes, and cannot be taken away: %v", path, err))
					return
				}
				continue
			}
			g.say(audit.Record{Kind: audit.KindGit, Event: "link-removed", Path: path, Detail: map[string]string{"to": audit.Printable(to)},
				Text: "a link appeared where git on the host writes: it is taken away; it led to " + audit.Printable(to)})
		}
	})
	g.hostile("made links where git on the host writes", len(links))
}

// linkText reads a link by the descriptor of its folder.
func linkText(root int, path string) string {
	dir, name, err := pathfd.Parent(root, path)
	if err != nil {
		return ""
	}
	defer unix.Close(dir)
	to := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(dir, name, to)
	if err != nil {
		return ""
	}
	return string(to[:n])
}

// hostile counts what no tool does, and ends an agent that goes on. The lock is held.
func (g *Guard) hostile(what string, times int) {
	if g.hostilities += times; g.hostilities > maxHostile && len(g.boxes) > 0 {
		g.stop(fmt.Sprintf("it %s, more than %d times", what, maxHostile))
	}
}

// persists counts names of the agent's that were taken away, and ends an agent that goes on; those
// of them that git would have obeyed, and which were set aside, count for more. The lock is held.
func (g *Guard) persists(names, obeyed []string) {
	for _, name := range obeyed {
		if toolless[filepath.Base(name)] {
			g.hostile("made "+name+", which git on the host would obey", 1)
		}
	}
	now := time.Now()
	g.undoings = slices.DeleteFunc(g.undoings, func(at time.Time) bool { return now.Sub(at) > persisting })
	if g.undoings = append(g.undoings, now); len(g.undoings) > maxPersisting && len(g.boxes) > 0 {
		g.stop(fmt.Sprintf("it made %s and the like, which git on the host would obey, more than %d times in a minute", names[0], maxPersisting))
	}
}

// toolless are names that nothing in everyday use makes in a repository that is there already.
var toolless = map[string]bool{"commondir": true, "remotes": true, "config": true, "config.worktree": true, "HEAD": true}
