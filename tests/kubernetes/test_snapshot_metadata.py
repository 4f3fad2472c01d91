"""Which parts of a snapshot hold data or changed, as a backup program in Kubernetes asks for it.

The sidecar and the client are upstream's own; the sidecar runs as examples/kubernetes has it
patched into our DaemonSet, with the service account's rights.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # comes with lightkube

from tests.kubernetes import snapshots
from tests.kubernetes.account import NAMESPACE
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import EXAMPLES, Deployment, documents
from tests.kubernetes.sandbox import SandboxError
from tests.kubernetes.test_snapshots import SNAPSHOT
from tests.kubernetes.test_volumes import MIB, example, write
from tests.kubernetes.tools import metadata
from tests.kubernetes.tools.metadata import MetadataTools
from tests.support.examples import used
from tests.support.wait import until

pytestmark = pytest.mark.nightly

NAME = "virtlun-snapshot-metadata"
PORT = 50051
READER = """\
apiVersion: v1
kind: ServiceAccount
metadata: {name: backup}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: stranger}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: backup}
rules:
  - {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshots], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: backup}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: backup}
subjects: [{kind: ServiceAccount, name: backup, namespace: default}]
"""

Ask = Callable[..., list[dict[str, Any]]]


def service(cluster: Cluster, address: str) -> str:
    """Returns the example's objects, with the test's authority, at the node's address."""
    made = list(yaml.safe_load_all(used(EXAMPLES / "snapshotmetadata.yaml").read_text()))
    (found,) = (one for one in made if one["kind"] == "SnapshotMetadataService")
    found["spec"]["caCert"] = base64.b64encode(cluster.pki.ca.read_bytes()).decode()
    found["spec"]["address"] = address
    return str(yaml.safe_dump_all(made))


@pytest.fixture(scope="module")
def programs() -> MetadataTools:
    """The sidecar and its client; built now where they are not there."""
    return metadata.build()


@pytest.fixture(scope="module")
def ask(cluster: Cluster, deployment: Deployment, programs: MetadataTools) -> Iterator[Ask]:
    """Asks the sidecar, by upstream's client."""
    address = deployment.node.address
    cluster.apply(programs.crd)
    cluster.wait("crd/snapshotmetadataservices.cbt.storage.k8s.io", "condition=Established")
    objects = service(cluster, f"{address}:{PORT}")
    certificate, key = cluster.pki.issue(NAME, f"/CN={NAME}.{NAMESPACE}", f"IP:{address}")
    secret = deployment.secrets / NAME
    secret.mkdir(parents=True)
    (secret / "tls.crt").write_bytes(certificate.read_bytes())
    (secret / "tls.key").write_bytes(key.read_bytes())
    text = cluster.kubectl(
        *("patch", "--local", "-f", EXAMPLES / "daemonset.yaml", "-o", "json"),
        *("--patch-file", used(EXAMPLES / "snapshotmetadata-sidecar.yaml")),
    )
    (driver,) = (d for d in documents(text) if d["metadata"]["name"] == "virtlun-csi")
    cluster.apply(json.dumps(driver), dry_run=True)
    found = deployment.containers_of(driver)
    (sidecar,) = (one for one in found if one.name == "csi-snapshot-metadata")

    def asked(snapshot: str, *words: str, account: str = "backup") -> list[dict[str, Any]]:
        said = cluster.box.run(
            *(programs.client, "-kubeconfig", cluster.kubeconfig, "-snapshot", snapshot),
            *("-account", account, *words),
        ).stdout
        return list(json.loads(said))

    with (
        snapshots.controller(cluster),
        cluster.applied(objects),
        cluster.applied(READER),
        deployment.also(sidecar, programs.sidecar),
    ):
        yield asked


@pytest.fixture
def taken(cluster: Cluster, deployment: Deployment, ask: Ask) -> Iterator[None]:
    """Snapshots `one` and `two` of a thin block device, of which 1 MiB and 33 MiB were written."""
    text = example("pod-block").replace("virtlun-block", "virtlun-thin")
    cluster.apply(text)
    cluster.wait("pod/raw", "condition=Ready")
    for name, at in (("one", 1), ("two", 33)):
        write(cluster, "raw", name, at)
        cluster.apply(SNAPSHOT.format(name=name, claim="disk"))
        snapshots.wait_ready(cluster, name)
    yield
    cluster.api.delete_all("volumesnapshot")
    deployment.sweep()
    until(lambda: not cluster.items("volumesnapshotcontent"), "no content", deadline_s=180)
    deployment.wait_clean()


def places(messages: list[dict[str, Any]]) -> list[int]:
    """Returns the MiB in which the parts are."""
    assert all(one["volume_capacity_bytes"] == 64 * MIB for one in messages)
    parts = [part for one in messages for part in one["block_metadata"] or ()]
    return [part.get("byte_offset", 0) // MIB for part in parts]


def test_what_a_snapshot_holds_and_what_changed_since_another(ask: Ask, taken: None) -> None:
    assert places(ask("one")) == [1]
    assert places(ask("two")) == [1, 33]
    assert places(ask("two", "-previous", "one")) == [33]
    by_one = ask("two", "-most", "1")
    assert [len(one["block_metadata"]) for one in by_one] == [1, 1]
    assert places(ask("two", "-from", str(20 * MIB))) == [33]


def test_who_may_not_see_the_snapshots_is_told_nothing(ask: Ask, taken: None) -> None:
    with pytest.raises(SandboxError, match="PermissionDenied"):
        ask("one", account="stranger")


def test_what_the_driver_refuses_is_told(ask: Ask, taken: None) -> None:
    with pytest.raises(SandboxError, match="name the earlier one"):
        ask("one", "-previous", "two")
    with pytest.raises(SandboxError, match="which has 67108864 bytes"):
        ask("one", "-from", str(64 * MIB))
