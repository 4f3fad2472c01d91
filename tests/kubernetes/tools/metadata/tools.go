//go:build tools

// The sidecar is built from this module, too.
package main

import _ "github.com/kubernetes-csi/external-snapshot-metadata/cmd/csi-snapshot-metadata"
