// Prints what a snapshot holds, or what changed between two, as a backup program asks for it: with
// upstream's own client of the sidecar csi-snapshot-metadata, which is built from this module, too.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/iterator"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	var args iterator.Args
	kubeconfig := flag.String("kubeconfig", "", "configuration of kubectl")
	flag.StringVar(&args.Namespace, "namespace", "default", "that of the VolumeSnapshots")
	flag.StringVar(&args.SnapshotName, "snapshot", "", "the VolumeSnapshot")
	flag.StringVar(&args.PrevSnapshotName, "previous", "", "an earlier one: what changed since")
	flag.StringVar(&args.SANamespace, "account-namespace", "default", "that of the service account")
	flag.StringVar(&args.SAName, "account", "", "the service account as which to ask")
	flag.Int64Var(&args.StartingOffset, "from", 0, "byte to begin at")
	most := flag.Int("most", 0, "ranges in a message (0: the driver decides)")
	flag.Parse()
	args.MaxResults = int32(*most)
	if err := print(*kubeconfig, args); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func print(kubeconfig string, args iterator.Args) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	if args.Clients, err = iterator.BuildClients(config); err != nil {
		return err
	}
	args.Emitter = &iterator.JSONEmitter{Writer: os.Stdout}
	return iterator.GetSnapshotMetadata(context.Background(), args)
}
