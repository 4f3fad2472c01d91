"""What the manifest of our DaemonSets starts, as commands on the node itself.

Several nodes share a machine here, and tests kill programs one by one. So a test cluster takes the
containers' commands, arguments and environment from examples/kubernetes/daemonset.yaml, with the
node's own paths in place of the mounts', and runs them as processes of the node: what users apply
is what is tested, but for what a container changes, which test_daemonset.py looks at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

EMPTY_DIR = "emptyDir"
SECRET = "secret"
#: Sidecars' manifests give arguments only: the program is the image's own.
IMAGE_PROGRAM = re.compile(r"/(csi-[a-z-]+):")


@dataclass(frozen=True)
class Container:
    """One container's process."""

    name: str
    program: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    #: What it may do, as setpriv names it; None: everything.
    capabilities: tuple[str, ...] | None = None


def containers(
    daemonset: Mapping[str, Any], host: Mapping[str, str], fields: Mapping[str, str]
) -> Iterator[Container]:
    """Yields the containers of a DaemonSet.

    `host` says where a host path of the manifest is in truth, by EMPTY_DIR where folders of the
    pod's own are, and by SECRET those of Secrets; `fields` are the values of the downward API.
    KeyError where the manifest has one that is not among them.
    """
    spec = daemonset["spec"]["template"]["spec"]
    paths = {volume["name"]: _host_path(volume, host) for volume in spec["volumes"]}
    for container in spec["containers"]:
        mounts = {mount["mountPath"]: paths[mount["name"]] for mount in container["volumeMounts"]}
        environment = {
            item["name"]: item["value"]
            if "value" in item
            else fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
            for item in container.get("env", [])
        }
        words = [*container.get("command", []), *container.get("args", [])]
        if "command" not in container:
            named = IMAGE_PROGRAM.search(container["image"])
            assert named, f"{container['name']}: no command, and the image is not a sidecar's"
            words = [named.group(1), *words]
        words = [_on_host(_expand(word, environment), mounts) for word in words]
        kept = kept_capabilities(container)
        yield Container(container["name"], words[0], words[1:], environment, kept)


def kept_capabilities(container: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Returns the capabilities of a container that drops all but those; None for others."""
    given = container.get("securityContext", {}).get("capabilities", {})
    if given.get("drop") != ["ALL"]:
        return None
    return tuple(name.lower() for name in given.get("add", []))


def _host_path(volume: Mapping[str, Any], host: Mapping[str, str]) -> str:
    if "emptyDir" in volume:
        return f"{host[EMPTY_DIR]}/{volume['name']}"
    if "secret" in volume:
        return f"{host[SECRET]}/{volume['secret']['secretName']}"
    path = str(volume["hostPath"]["path"])
    for prefix, place in host.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return place + path.removeprefix(prefix)
    raise KeyError(f"the manifest mounts {path}, for which there is no place here")


def _expand(word: str, environment: Mapping[str, str]) -> str:
    """Returns a word with $(NAME) replaced, as kubelet does."""
    return re.sub(r"\$\(([A-Z_]+)\)", lambda found: environment[found.group(1)], word)


def _on_host(word: str, mounts: Mapping[str, str]) -> str:
    """Returns a word, an option perhaps, with a path below a mount replaced by the host's."""
    for mount, place in sorted(mounts.items(), reverse=True):
        found = re.match(rf"(|--[a-z-]+=|(?:--[a-z-]+=)?unix://){re.escape(mount)}(?=/|$)", word)
        if found:
            return found.group(1) + place + word[found.end() :]
    return word
