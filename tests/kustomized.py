"""The manifests of infra/k8s as Kustomize builds base, without it: as much of Kustomize as base uses.

`make k8s-check` compares this with what kubectl makes of the same files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

BASE = Path(__file__).parents[1] / "infra/k8s/base"
Manifest = dict[str, Any]
KEYS = {"containers": "name", "volumes": "name", "env": "name", "ports": "containerPort", "volumeMounts": "mountPath"}  # fmt: skip
_NOT_IN_A_NAMESPACE = ("Namespace",)


def documents(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def merged(onto: Any, patch: Any, key: str = "") -> Any:
    """A strategic merge: maps by key, the lists of `KEYS` by their elements' names, all else replaced."""
    if isinstance(onto, dict) and isinstance(patch, dict):
        both = {name: merged(onto[name], value, name) for name, value in patch.items() if name in onto}
        return {**onto, **patch, **both}
    if isinstance(onto, list) and isinstance(patch, list) and key in KEYS:
        by = KEYS[key]
        theirs = {each[by]: each for each in patch}
        kept = [merged(each, theirs.pop(each[by])) if each[by] in theirs else each for each in onto]
        return [*kept, *theirs.values()]
    return patch


def base() -> list[Manifest]:
    """What base is made of, with its patches, labels, namespace and images; the ConfigMap's name is without its hash."""
    settings = documents(BASE / "kustomization.yaml")[0]
    found = [document for name in settings["resources"] for document in documents(BASE / name)]
    for patch in settings["patches"]:
        (change,) = documents(BASE / patch["path"])
        kind, name = change.pop("kind"), change.pop("metadata")["name"]
        found = [
            merged(each, change) if each["kind"] == kind and ("target" in patch or each["metadata"]["name"] == name) else each
            for each in found
        ]  # fmt: skip
    tags = {image["name"]: image["newTag"] for image in settings["images"]}
    (labels,) = [each["pairs"] for each in settings["labels"]]
    for each in found:
        each["metadata"] = merged(each["metadata"], {"labels": labels})
        if each["kind"] not in _NOT_IN_A_NAMESPACE:
            each["metadata"]["namespace"] = settings["namespace"]
        if "template" in each.get("spec", {}):
            each["spec"]["template"] = merged(each["spec"]["template"], {"metadata": {"labels": labels}})
        for container in containers(each):
            container["image"] = f"{container['image']}:{tags[container['image']]}"
    for generated in settings["configMapGenerator"]:
        data = {name: (BASE / name).read_text() for name in generated["files"]}
        metadata = {"name": generated["name"], "namespace": settings["namespace"], "labels": labels}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    return found


def pod(manifest: Manifest) -> Manifest:
    """The pod's spec of a workload; empty for anything else."""
    return manifest.get("spec", {}).get("template", {}).get("spec", {})


def containers(manifest: Manifest) -> Iterator[Manifest]:
    yield from pod(manifest).get("containers", [])
