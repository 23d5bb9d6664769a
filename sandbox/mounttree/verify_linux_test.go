package mounttree

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const mountinfo = `22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /tmp/old rw - tmpfs x rw
24 22 0:22 / /tmp rw - tmpfs host rw
40 24 0:23 / /tmp rw,nosuid - tmpfs tree rw
41 40 0:24 / /tmp/usr ro,nosuid,nodev - ext4 /dev/vda rw
42 41 0:25 / /tmp/usr/local ro - ext4 /dev/vda rw
43 40 0:26 / /tmp/with\040space rw - tmpfs x rw
44 22 0:27 / /tmpfoo rw - tmpfs x rw
45 23 0:28 / /tmp/old/below rw - tmpfs x rw
`

func TestOnlyWhatHangsOnTheTreeCounts(t *testing.T) {
	got, err := parseMountinfo(mountinfo, "/tmp")
	want := map[string]bool{"/": false, "/usr": true, "/usr/local": true, "/with space": false}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	if _, err := parseMountinfo("22 1 0:20 /\n", "/tmp"); err == nil {
		t.Error("a line that is cut short was read")
	}
}

func FuzzMountinfo(f *testing.F) {
	f.Add(mountinfo)
	f.Add(`1 1 0:1 / /tmp\04 ro - a b c` + "\n")
	f.Fuzz(func(t *testing.T, text string) {
		got, err := parseMountinfo(text, "/tmp")
		if err != nil {
			return
		}
		for target := range got {
			if !strings.HasPrefix(target, "/") {
				t.Errorf("%q is no path below the tree", target)
			}
		}
	})
}
