// Links in git directories. git on the host writes to files there by name and follows a link of
// that name, so one that the agent makes would have the host write what the agent chose where
// the agent cannot. No mount forbids a new name: links are taken away as they appear.

package sealguard

import (
	"fmt"
	"path/filepath"
	"slices"
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
)

// inner are the folders of git directories in which links are looked for.
type inner struct {
	dirs  map[string]bool // folder → it is a git directory itself
	links map[string]bool // links that the host made
	// fresh are names that came since the last look; all: any may have.
	fresh map[string]bool
	all   bool
}

// Inside watches the git directories for links, but for those in links, which were there before
// anything of the agent ran. It is told once.
func (g *Guard) Inside(gitDirs, links map[string]bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.inner.links != nil {
		return
	}
	g.inner.links = links
	var found []string
	for dir := range gitDirs {
		found = append(found, g.enter(dir, true)...)
	}
	g.unlink(found)
}

// enter watches a folder and those below it, and gives the links that must not be there.
func (g *Guard) enter(dir string, top bool) (links []string) {
	folders, links := gitseal.Inner(dir, top)
	for _, f := range folders {
		g.lookAgain(f)
		g.inner.dirs[f] = top && f == dir
	}
	if len(folders) > 0 { // what came since the list was made
		_, links = gitseal.Inner(dir, top)
	}
	return slices.DeleteFunc(links, func(l string) bool { return g.inner.links[l] })
}

// lookAgain watches what stands at a path now, whatever was watched there before.
func (g *Guard) lookAgain(dir string) {
	delete(g.dirs, dir)
	g.look(dir)
}

// came takes note of a name in a watched folder.
func (i *inner) came(dir, name string, mask uint32) {
	top, ok := i.dirs[dir]
	if ok && mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0 && (!top || mask&unix.IN_ISDIR == 0 || gitseal.IsInner(name)) {
		i.fresh[dir+"/"+name] = true
	}
}

// checkInner looks at the names that came. The lock is held.
func (g *Guard) checkInner() {
	var links []string
	if g.inner.all {
		for dir, top := range g.inner.dirs {
			if top {
				links = append(links, g.enter(dir, true)...)
			}
		}
	}
	for path := range g.inner.fresh {
		st, err := g.place.stat(path)
		switch {
		case err != nil:
		case st.Mode&unix.S_IFMT == unix.S_IFDIR:
			delete(g.inner.dirs, path) // another one, perhaps
			links = append(links, g.enter(path, false)...)
		case st.Mode&unix.S_IFMT == unix.S_IFLNK && !g.inner.links[path]:
			links = append(links, path)
		}
	}
	g.inner.fresh, g.inner.all = map[string]bool{}, false
	g.unlink(links)
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
				if _, serr := g.place.stat(path); serr == nil {
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

// persists counts names of the agent's that were set aside, and ends an agent that goes on. The
// lock is held.
func (g *Guard) persists(names []string) {
	for _, name := range names {
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
