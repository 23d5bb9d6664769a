package gitclone

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// Limits of what is read of a repository.
const (
	maxRefs    = 100_000
	maxRef     = 4 << 10 // bytes of one file
	maxObjects = 1_000_000
)

var refText = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})$`) })

// Refs are those of a bare repository.
type Refs struct {
	// IDs leads from a name to its object, or to "ref: NAME".
	IDs map[string]string
	// Locks are files of a push that goes on or was cut off.
	Locks []string
	// Odd is what is neither a folder nor a file that holds a ref.
	Odd []string
}

// Read reads the refs of the bare repository dir. It follows no link and blocks on no file.
func Read(dir string) (r Refs, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return r, err
	}
	defer root.Close()
	r.IDs = map[string]string{}
	err = walk(root, "refs", maxRefs, func(name string, d fs.DirEntry) error {
		if !d.Type().IsRegular() {
			r.Odd = append(r.Odd, name)
			return nil
		}
		if strings.HasSuffix(name, ".lock") {
			r.Locks = append(r.Locks, name)
			return nil
		}
		text, err := readRef(root, name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			r.Odd = append(r.Odd, name)
		default:
			r.IDs[name] = text
		}
		return nil
	})
	return r, err
}

// Odd lists what lies among the objects and is neither a folder nor a regular file.
func Odd(dir string) (odd []string, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	err = walk(root, "objects", maxObjects, func(name string, d fs.DirEntry) error {
		if !d.Type().IsRegular() {
			odd = append(odd, name)
		}
		return nil
	})
	return odd, err
}

// Remove takes names in the repository away.
func Remove(dir string, names []string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, name := range names {
		err = errors.Join(err, root.RemoveAll(name))
	}
	return err
}

// walk calls f for everything below top that is no folder.
func walk(root *os.Root, top string, most int, f func(name string, d fs.DirEntry) error) error {
	n := 0
	return fs.WalkDir(root.FS(), top, func(name string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // gone meanwhile
		case err != nil:
			return err
		case d.IsDir():
			return nil
		}
		if n++; n > most {
			return fmt.Errorf("more than %d files in %s", most, path.Join(root.Name(), top))
		}
		return f(name, d)
	})
}

func readRef(root *os.Root, name string) (string, error) {
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRef+1))
	if err != nil {
		return "", err
	}
	text := strings.TrimSpace(string(b))
	if to, ok := strings.CutPrefix(text, "ref: "); ok && len(b) <= maxRef && strings.HasPrefix(to, "refs/") {
		return text, nil
	}
	if !refText().MatchString(text) {
		return "", errors.New("it holds no ref")
	}
	return text, nil
}

// Change is one ref that is another than before; Old or New is empty where there is none.
type Change struct{ Ref, Old, New string }

// String is the change for people: "refs/heads/main 0123456789ab..fedcba987654".
func (c Change) String() string {
	short := func(id string) string {
		if id == "" {
			return "(none)"
		}
		return id[:min(len(id), 12)]
	}
	return c.Ref + " " + short(c.Old) + ".." + short(c.New)
}

// Changes compares two readings, by name.
func Changes(before, after map[string]string) []Change {
	names := map[string]bool{}
	for _, m := range []map[string]string{before, after} {
		for n := range m {
			names[n] = true
		}
	}
	var out []Change
	for _, n := range slices.Sorted(maps.Keys(names)) {
		if before[n] != after[n] {
			out = append(out, Change{n, before[n], after[n]})
		}
	}
	return out
}
