// Seals: files in writable folders that the host's programs obey, made read-only in the
// view. Which they are is found out elsewhere; here they become rules like all others.

package sandbox

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
)

// ChangedError says that something found a moment ago is no longer there: look again and
// compile anew.
type ChangedError struct {
	Path string
	Err  error
}

func (e *ChangedError) Error() string { return e.Path + " changed meanwhile: " + e.Err.Error() }
func (e *ChangedError) Unwrap() error { return e.Err }

// seals adds a rule wherever the view shows a sealed path for writing.
func (c *compiler) seals() error {
	c.notes = append(c.notes, c.p.SealNotes...)
	list := slices.Clone(c.p.Seals)
	slices.SortStableFunc(list, func(a, b Seal) int { return comparePaths(a.Path, b.Path) })
	var outside []string
	for _, s := range list {
		if s.How != SealOutside {
			continue
		}
		if err := CheckGrant(c.p, s.Path, ReadWrite, c.h); err != nil {
			var refused *RefusedError
			if errors.As(err, &refused) {
				c.note("%s: %s; git does not work there", s.Why, refused)
				continue
			}
			return &ChangedError{Path: s.Path, Err: err}
		}
		outside = append(outside, s.Path)
		c.place(s.Path, s.Path, rule{access: ReadOnly, kind: KindDir, why: s.Why})
	}
	for _, s := range list {
		shown := slices.ContainsFunc(outside, func(o string) bool { return s.Path != o && inside(s.Path, o) })
		if s.How == SealIsland && shown {
			c.place(s.Path, s.Path, rule{access: ReadWrite, kind: s.Kind, keep: true, why: s.Why})
		}
	}
	sorted := c.sorted()
	for _, s := range list {
		if s.How == SealOutside || s.How == SealIsland || s.How == SealTrusted && c.granted(s.Path) {
			continue
		}
		for _, r := range sorted {
			if r.op != OpBind || r.kind != KindDir || r.access != ReadWrite || r.private || !inside(s.Path, r.source) {
				continue
			}
			at := filepath.Join(r.target, strings.TrimPrefix(s.Path, r.source))
			owner := ownerOf(sorted, at)
			if same := owner.target == at && owner.source == s.Path && owner.access == ReadWrite; owner.target != r.target && !same {
				continue // something more specific is shown there, and not this very file for writing
			}
			n := rule{target: at, source: s.Path, op: OpBind, access: ReadOnly, kind: s.Kind, keep: true, seal: true, why: s.Why}
			switch {
			case s.How == SealFile, s.Source != "" && !writable(sorted, s.Source):
				n.op, n.source, n.text, n.kind = OpCover, "", s.Text, KindFile
			case s.Source != "":
				n.source = s.Source
			}
			c.add(n)
		}
	}
	return nil
}

// writable reports whether the agent can write a host path in some place of its view: what a
// link leads to must not be shown for the link's sake.
func writable(sorted []rule, path string) bool {
	return slices.ContainsFunc(sorted, func(r rule) bool {
		return r.op == OpBind && r.access == ReadWrite && !r.private && inside(path, r.source) &&
			ownerOf(sorted, filepath.Join(r.target, strings.TrimPrefix(path, r.source))).target == r.target
	})
}

// granted reports whether the operator opened this very path for writing.
func (c *compiler) granted(path string) bool {
	return slices.ContainsFunc(c.p.Grants, func(g Grant) bool {
		return g.Access == ReadWrite && realOr(c.h, filepath.Clean(g.Path)) == path
	})
}
