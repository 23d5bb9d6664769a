//go:build linux && !amd64

package vfork

// Run starts the program, as a child of the calling thread and the first of a session of its own, in
// the root directory: in a user namespace with a copy of our memory, here.
func (s *Start) Run() (*Process, error) { return s.plain() }
