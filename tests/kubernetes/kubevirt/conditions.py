"""Whether a plugin's condition holds for an instance, as KubeVirt's CEL evaluator would tell.

The API server has one, so it is asked: a ValidatingAdmissionPolicy with the expression, `object` in
the place of `vmi`, meets a creation of the instance that is only a dry run.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from tests.kubernetes.cluster import Cluster
from tests.support.wait import until

LABEL = "test.example/condition"
HOLDS, DOES_NOT = "the condition holds", "the condition does not hold"
DEADLINE_S = 90.0


class Conditions:
    """Asks, and remembers."""

    def __init__(self, cluster: Cluster) -> None:
        """Asks this cluster's server, where KubeVirt's kinds are."""
        self._cluster = cluster
        self._known: dict[tuple[str, str], bool] = {}

    def hold(self, expression: str, vmi: Mapping[str, Any]) -> bool:
        """Whether an expression is true of an instance; SandboxError if it is none."""
        if not expression:
            return True
        key = hashlib.sha256(expression.encode()).hexdigest()[:8]
        asked = (key, str(vmi["metadata"]["uid"]))
        if asked not in self._known:
            self._known[asked] = self._ask(key, expression, vmi)
        return self._known[asked]

    def _ask(self, key: str, expression: str, vmi: Mapping[str, Any]) -> bool:
        name = f"condition-{key}"
        for manifest in _policy(name, key, expression):
            self._cluster.apply(json.dumps(manifest))
        tried = copy.deepcopy(dict(vmi))
        labels = {**vmi["metadata"].get("labels", {}), LABEL: key}
        tried["metadata"] = {
            "name": f"{vmi['metadata']['name']}-{key}",
            "namespace": vmi["metadata"]["namespace"],
            "annotations": vmi["metadata"].get("annotations", {}),
            "labels": labels,
        }
        words = ["create", "--dry-run=server", "-f", "-"]

        def said() -> str:
            """Returns one of both sentences, once the policy is in force."""
            done = self._cluster.box.run(
                self._cluster.tools.path("kubectl"),
                f"--kubeconfig={self._cluster.kubeconfig}",
                *words,
                stdin=json.dumps(tried),
                check=False,
            )
            return next((one for one in (HOLDS, DOES_NOT) if one in done.stderr), "")

        return until(said, f"the policy {name}", deadline_s=DEADLINE_S, every_s=0.2) == HOLDS


def _policy(name: str, key: str, expression: str) -> list[dict[str, Any]]:
    api = "admissionregistration.k8s.io/v1"
    written = re.sub(r"\bvmi\b", "object", expression)
    return [
        {
            "apiVersion": api,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": name},
            "spec": {
                "matchConstraints": {
                    "objectSelector": {"matchLabels": {LABEL: key}},
                    "resourceRules": [
                        {
                            "apiGroups": ["kubevirt.io"],
                            "apiVersions": ["v1"],
                            "operations": ["CREATE"],
                            "resources": ["virtualmachineinstances"],
                        }
                    ],
                },
                "validations": [
                    {"expression": f"!({written})", "message": HOLDS},
                    {"expression": "false", "message": DOES_NOT},
                ],
            },
        },
        {
            "apiVersion": api,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        },
    ]
