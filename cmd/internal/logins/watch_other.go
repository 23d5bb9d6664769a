//go:build !linux

package logins

import "context"

// Watch waits: without a boundary the agent uses the host's login itself.
func (s *Sync) Watch(ctx context.Context) { <-ctx.Done() }
