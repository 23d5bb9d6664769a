// Folders on a file system whose server is gone.

package daemon

import (
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/sandbox"
)

// answerPatience is how long a file system may take to answer.
const answerPatience = 5 * time.Second

// unanswered are the folders that were asked for and have not been answered for yet. The kernel
// waits for the server of a file system (NFS, sshfs) without end, and the thread that asked with it:
// one thread for each folder, however often an agent is started.
var unanswered struct {
	sync.Mutex
	by map[string]*question
}

type question struct {
	asked time.Time
	done  chan struct{}
}

// Answers returns an error if one of the folders lies on a file system that does not answer: to
// look at it would hold up whoever does, with all that waits for him.
func Answers(folders ...string) error {
	asked := make([]*question, len(folders))
	for i, f := range folders {
		asked[i] = ask(f)
	}
	for i, q := range asked {
		late := time.NewTimer(time.Until(q.asked.Add(answerPatience)))
		select {
		case <-q.done:
			late.Stop()
		case <-late.C:
			return &Refusal{Code: 1, Text: fmt.Sprintf("%s does not answer: the server of its file system (NFS, sshfs, …) is gone or too slow; bring it back, or take the file system away: `umount -l` (`fusermount3 -uz` for one of yours)", folders[i])}
		}
	}
	return nil
}

// ask asks for a folder, unless that was done already and is not answered.
func ask(folder string) *question {
	unanswered.Lock()
	defer unanswered.Unlock()
	if q := unanswered.by[folder]; q != nil {
		return q
	}
	q := &question{asked: time.Now(), done: make(chan struct{})}
	if unanswered.by == nil {
		unanswered.by = map[string]*question{}
	}
	unanswered.by[folder] = q
	go func() {
		// What it says is of no interest. Attributes could come out of a cache; this does not.
		_ = unix.Statfs(folder, &unix.Statfs_t{})
		unanswered.Lock()
		delete(unanswered.by, folder)
		unanswered.Unlock()
		close(q.done)
	}()
	return q
}

// answering returns an error if a folder that the agent works in does not answer.
func answering(a *agent.Agent) error {
	folders := a.Folders() // all that it may write
	for _, g := range a.Grants {
		if g.Access != sandbox.ReadWrite {
			folders = append(folders, g.Path)
		}
	}
	if err := Answers(folders...); err != nil {
		return fmt.Errorf("agent %s: %w", a.ID, err)
	}
	return nil
}
