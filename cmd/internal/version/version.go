// Package version holds the build's version, which the linker sets:
//
//	go build -ldflags '-X agentconnect.md/sandbox/cmd/internal/version.Version=1.2.3'
//
// It knows nothing of protocols; their versions stand with their words.
package version

// Version of this build. Supervisors and daemon compare it as an opaque word.
var Version = "dev"
