//go:build tools

// What is built from this module beside the suite: the program of its pods, and what runs specs side by side.
package suite

import (
	_ "github.com/onsi/ginkgo/v2/ginkgo"
	_ "k8s.io/kubernetes/test/images/agnhost"
)
