package launch

import "runtime"

// lockThread keeps the goroutine on its thread until it ends, and the thread with it.
func lockThread() { runtime.LockOSThread() }
