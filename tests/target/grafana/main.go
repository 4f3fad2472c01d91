// Reads a dashboard as Grafana's own structures do, and with none of their default values.
//
//	grafana <dashboard.json
//
// Its output is a line for each thing that is not of a dashboard, or of the panel or the query that
// it stands in.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

func main() {
	plugins.RegisterDefaultPlugins()
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	read := dashboard.Dashboard{}
	if err := read.UnmarshalJSONStrict(text); err != nil {
		say(err)
		return
	}
	if err := read.Validate(); err != nil {
		say(err)
	}
}

func say(err error) {
	var faults cog.BuildErrors
	if !errors.As(err, &faults) {
		fmt.Println(err)
		return
	}
	for _, fault := range faults {
		fmt.Println(fault)
	}
}
