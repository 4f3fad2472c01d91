"""Kubernetes' own suite for storage drivers, run against ours: `make test-e2e`.

`program` builds the suite from source, `images` makes the images that its pods name, `runs` says
what is run: a manifest here tells the suite what a class of ours can do, on one node or two.
`verdict` reads its report: what failed, and for each spec that was skipped the reason, which stands
in skips.yaml. A skip that is not listed there fails the run, as a failure does.

Who changes the driver's capabilities changes the manifests: they claim all that it claims.
"""
