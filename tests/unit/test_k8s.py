"""infra/k8s: every service has a pod that fits its configuration, may do no more than it must, and is found by what selects it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import typer.main
import yaml

from pipeline.config import load
from pipeline.signal.grading import parse
from schemas.config import RunConfig
from services.cli.deploy_secrets import Given, make
from services.cli.main import app
from services.cli.service import check_place
from services.process import SERVICES, drain_of
from tests.kustomized import BASE, Manifest, base, containers, documents, pod

ROOT = BASE.parents[2]
K8S = BASE.parent
COMPONENT, POOL = "app.kubernetes.io/component", "packtrain.dev/pool"
MANIFESTS = base()
WORKLOADS = {m["metadata"]["name"]: m for m in MANIFESTS if pod(m)}
RUNNING = {name: m for name, m in WORKLOADS.items() if m["kind"] != "Job"}
CONTAINERS = [(name, c) for name, m in WORKLOADS.items() for c in containers(m)]
SERVICE_CONTAINERS = [(name, c) for name, c in CONTAINERS if WORKLOADS[name]["kind"] != "Job"]
ids = [f"{name}/{c['name']}" for name, c in SERVICE_CONTAINERS]
_BYTES = {"Mi": 1 << 20, "Gi": 1 << 30}


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load(BASE / "run.toml")


def of_kind(kind: str) -> list[Manifest]:
    return [m for m in MANIFESTS if m["kind"] == kind]


def service_of(container: Manifest) -> str:
    return container["args"][1]


def option(container: Manifest, name: str) -> str:
    args = container["args"]
    return args[args.index(name) + 1] if name in args else ""


def labels(workload: Manifest) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]


def selected(selector: Manifest) -> list[str]:
    """Workloads of base whose pods a selector of labels means."""
    wanted: dict[str, str] = selector.get("matchLabels", {})
    among: list[Manifest] = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in among)
    return [
        name
        for name, m in WORKLOADS.items()
        if all(labels(m).get(key) == value for key, value in wanted.items())
        and all(labels(m).get(each["key"]) in each["values"] for each in among)
    ]


def mounts(workload: Manifest, container: Manifest) -> dict[str, Any]:
    """Volumes by where they are mounted."""
    volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}


def test_every_service_has_a_pod_and_no_pod_another_entry_point() -> None:
    assert {service_of(c) for _, c in SERVICE_CONTAINERS} == set(SERVICES)
    command = typer.main.get_command(app).commands["service"]  # pyright: ignore[reportAttributeAccessIssue]
    options = {name for each in command.params for name in each.opts if name.startswith("-")}
    for _, container in SERVICE_CONTAINERS:
        assert container["args"][0] == "service"
        assert option(container, "--config") == "/etc/packtrain/run.toml"
        assert {arg for arg in container["args"] if arg.startswith("-")} <= options
        assert "command" not in container  # the image's own begins with an init
    (begin,) = [c for name, c in CONTAINERS if name == "begin"]
    assert begin["args"] == ["runs", "begin", "--config", "/etc/packtrain/run.toml"]


def test_the_configuration_has_a_pod_for_each_of_its_pools_and_ranks(config: RunConfig) -> None:
    pools = {option(c, "--pool") for _, c in SERVICE_CONTAINERS if service_of(c) == "harness"}
    assert pools == {pool.name for pool in config.pools}
    for name, container in SERVICE_CONTAINERS:
        if service_of(container) == "harness":
            assert labels(WORKLOADS[name])[POOL] == option(container, "--pool")
    sizes, trainer = config.batch.sizes, WORKLOADS["trainer"]
    assert sizes.tp == 1  # or rank n would not be pod n
    assert trainer["spec"]["replicas"] == sizes.packers == sizes.ranks
    assert trainer["spec"]["podManagementPolicy"] == "Parallel"
    for index in range(sizes.packers):
        check_place(config, "packer", index, "")
        check_place(config, "trainer", index, "")
    for container in containers(trainer):
        assert option(container, "--index") == "$(POD_INDEX)"
        assert container["env"][0]["name"] == "POD_INDEX"
        assert "apps.kubernetes.io/pod-index" in container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"]


def test_the_rendezvous_is_rank_0_by_a_name_that_it_has_before_it_is_ready(config: RunConfig) -> None:
    host, _, port = config.trainer.rendezvous.partition(":")
    (service,) = [
        m for m in of_kind("Service") if m["metadata"]["name"] == WORKLOADS["trainer"]["spec"]["serviceName"]
    ]
    assert host == f"trainer-0.{service['metadata']['name']}"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["ports"][0]["port"] == int(port)


@pytest.mark.parametrize(("name", "container"), SERVICE_CONTAINERS, ids=ids)
def test_probes_ask_where_the_service_listens(name: str, container: Manifest, config: RunConfig) -> None:
    port = int((option(container, "--metrics-bind") or config.metrics.bind).rpartition(":")[2])
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    asked = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for probe, path in asked.items():
        get = container[probe]["httpGet"]
        assert (get["path"], ports[get["port"]]) == (path, port)
    others = [c for c in containers(WORKLOADS[name]) if c is not container]
    assert port not in {each["containerPort"] for c in others for each in c["ports"]}


@pytest.mark.parametrize(("name", "container"), CONTAINERS, ids=[f"{n}/{c['name']}" for n, c in CONTAINERS])
def test_pods_may_do_no_more_than_they_must(name: str, container: Manifest) -> None:
    spec = pod(WORKLOADS[name])
    security = container["securityContext"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["runAsUser"]) == (True, 10001)
    assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    profile = spec["securityContext"]["seccompProfile"]
    # One pool has sandboxes; its profile is in the repository.
    if name == "harness-tool":
        assert profile == {"type": "Localhost", "localhostProfile": "packtrain/sandbox.json"}
        assert (K8S / "seccomp/sandbox.json").exists()
    else:
        assert profile == {"type": "RuntimeDefault"}
        assert "appArmorProfile" not in spec["securityContext"]
    assert not any("hostPath" in volume for volume in spec["volumes"])
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    assert "memory" in container["resources"]["limits"]
    version = next(
        line.split('"')[1] for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version")
    )  # fmt: skip
    assert container["image"].endswith(f":{version}")


def test_a_pod_is_given_the_time_that_its_service_takes_to_stop(config: RunConfig) -> None:
    for name, container in SERVICE_CONTAINERS:
        drain_s = drain_of(config, service_of(container), option(container, "--pool"))
        assert pod(WORKLOADS[name])["terminationGracePeriodSeconds"] >= drain_s + 10
    # A trial needs its agent-loop host until it ends.
    assert config.agent_loop.drain_s >= max(pool.drain_s for pool in config.pools)


def test_what_the_configuration_names_is_mounted(config: RunConfig) -> None:
    for name, container in SERVICE_CONTAINERS:
        found = mounts(WORKLOADS[name], container)
        assert found["/etc/packtrain"]["configMap"]["name"] == "packtrain-config"
        assert "emptyDir" in found["/tmp"]  # where a read-only root is written to
        if service_of(container) in ("packer", "trainer"):
            assert "emptyDir" in found[config.packer.socket_dir]
        if service_of(container) == "agent-loop":
            assert any(
                PurePosixPath(config.agent_loop.journal_dir).is_relative_to(at)
                for at in found
                if at != "/tmp"
            )
    (packer,) = [c for _, c in SERVICE_CONTAINERS if service_of(c) == "packer"]
    limit = packer["resources"]["limits"]["memory"]
    assert int(limit[:-2]) * _BYTES[limit[-2:]] >= config.packer.memory_bytes + (256 << 20)


def secrets(tmp_path: Path) -> dict[str, dict[str, str]]:
    """{Secret: {key: its file}} of every `kubectl create secret` that secrets.sh runs."""
    directory = tmp_path / ".secrets"
    make(directory, Given(hosts=("nats.packtrain-servers",)), tmp_path / ".env", lambda said: None)
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
    kubectl.chmod(0o755)
    subprocess.run(
        [str(K8S / "secrets.sh"), str(directory)],
        env={"KUBECTL": str(kubectl), "RENDER": "1", "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
        timeout=30,
    )
    made: dict[str, dict[str, str]] = {}
    for line in (tmp_path / "said").read_text().splitlines():
        words = line.split()
        pairs = [
            word.removeprefix("--from-file=").partition("=")
            for word in words
            if word.startswith("--from-file=")
        ]
        assert all(Path(file).is_file() for _, _, file in pairs), line
        made[words[3]] = {key: str(Path(file).relative_to(directory)) for key, _, file in pairs}
    return made


def test_a_pod_has_the_secrets_of_its_kind_alone(tmp_path: Path, config: RunConfig) -> None:
    made = secrets(tmp_path)
    for name, container in CONTAINERS:
        kind = "launcher" if name == "begin" else service_of(container)
        volume = mounts(WORKLOADS[name], container)["/run/secrets"]
        assert volume["secret"]["secretName"] == f"packtrain-{kind}"
        assert volume["secret"]["defaultMode"] == 0o444
        files = made[f"packtrain-{kind}"]
        assert files["broker"] == f"broker/{kind}.nk"
        assert files["store"] == f"store/{kind}.json"
        assert set(files) - {"broker", "ca", "store"} == {
            *(["run-key"] if kind in ("agent-loop", "harness") else []),
            *(["engine-token"] if kind in ("agent-loop", "engine") else []),
        }
    named = {
        config.broker.credentials_file, config.broker.ca_file, config.store.credentials_file,
        config.engine.token_file, config.agent_loop.run_key_file,
    }  # fmt: skip
    keys = {key for name, files in made.items() if name.startswith("packtrain-") for key in files}
    assert named == {f"/run/secrets/{key}" for key in keys}
    assert {"nats-users", "nats-tls", "store-users"} == {
        name for name in made if not name.startswith("packtrain-")
    }


def test_no_manifest_holds_a_secret() -> None:
    for path in K8S.rglob("*.yaml"):
        for document in documents(path):
            assert document.get("kind") != "Secret", path
            assert "secretGenerator" not in document, path


def test_what_selects_pods_finds_those_that_it_means() -> None:
    for workload in RUNNING.values():
        assert selected(workload["spec"]["selector"]) == [workload["metadata"]["name"]]
    for budget in of_kind("PodDisruptionBudget"):
        assert selected(budget["spec"]["selector"]) == [budget["metadata"]["name"]]
    for service in of_kind("Service"):
        assert selected({"matchLabels": service["spec"]["selector"]}) == [service["metadata"]["name"]]
        (target,) = service["spec"]["ports"]
        ports = [p["name"] for c in containers(WORKLOADS[service["metadata"]["name"]]) for p in c["ports"]]
        assert target["targetPort"] in ports
    # Whoever has several hosts has a budget; of one replica it would hold its node for ever.
    budgets = {m["metadata"]["name"] for m in of_kind("PodDisruptionBudget")}
    assert budgets == {
        name for name, m in RUNNING.items() if name.startswith(("agent-loop", "harness-", "trainer"))
    }


def reaches(direction: str) -> set[tuple[str, str]]:
    """(from, to) of every pair of workloads that policies let speak in the direction; `*` for another namespace's."""
    found: set[tuple[str, str]] = set()
    side = "to" if direction == "egress" else "from"
    for policy in of_kind("NetworkPolicy"):
        mine = selected(policy["spec"]["podSelector"]) if policy["spec"]["podSelector"] else []
        for rule in policy["spec"].get(direction, []):
            for peer in rule[side]:
                others = ["*"] if "namespaceSelector" in peer else selected(peer["podSelector"])
                assert others, f"{policy['metadata']['name']} means nobody"
                found |= {(a, b) if direction == "egress" else (b, a) for a in mine for b in others}
    return found


def test_nothing_speaks_but_those_that_must() -> None:
    (deny,) = [m for m in of_kind("NetworkPolicy") if m["metadata"]["name"] == "default-deny"]
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    hosts = {(harness, "agent-loop") for harness in ("harness-chat", "harness-tool")}
    inside = {*hosts, ("agent-loop", "engine"), ("teacher", "engine"), ("trainer", "trainer")}
    assert {pair for pair in reaches("egress") if pair[1] != "*"} == inside
    assert {pair for pair in reaches("ingress") if pair[0] != "*"} == inside
    # Everyone reaches broker and store, and is scraped.
    assert {a for a, b in reaches("egress") if b == "*"} == set(WORKLOADS)
    assert {b for a, b in reaches("ingress") if a == "*"} == set(WORKLOADS)


def test_out_is_to_broker_store_and_names_alone(config: RunConfig) -> None:
    (servers,) = [m for m in of_kind("NetworkPolicy") if m["metadata"]["name"] == "servers"]
    out, names = servers["spec"]["egress"]
    namespace = out["to"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    for url in (config.broker.url, config.store.endpoint):
        host, _, port = url.partition("://")[2].partition(":")
        assert host.endswith(f".{namespace}")
        assert int(port) in [each["port"] for each in out["ports"]]
    assert {each["port"] for each in names["ports"]} == {53}
    servers_of = documents(K8S / "servers/network.yaml")
    (runs,) = [m for m in servers_of if m["metadata"]["name"] == "runs"]
    wanted = runs["spec"]["ingress"][0]["from"][0]["namespaceSelector"]["matchLabels"]
    (space,) = of_kind("Namespace")
    assert wanted.items() <= space["metadata"]["labels"].items()
    assert [each["port"] for each in runs["spec"]["ingress"][0]["ports"]] == [
        each["port"] for each in out["ports"]
    ]


def test_autoscalers_are_of_rollout_hosts_by_the_work_of_their_consumer(config: RunConfig) -> None:
    scalers = documents(K8S / "components/autoscaling/hpa.yaml")
    tenants = {f"harness-{pool.name}": pool.tenants for pool in config.pools}
    tenants["agent-loop"] = config.agent_loop.tenants
    assert {m["metadata"]["name"] for m in scalers} == set(tenants)
    for scaler in scalers:
        name, spec = scaler["metadata"]["name"], scaler["spec"]
        assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
        assert name in WORKLOADS
        metric = spec["metrics"][0]["external"]
        assert metric["metric"]["selector"]["matchLabels"] == {"run": config.run, "consumer": name}
        assert 0 < int(metric["target"]["averageValue"]) <= tenants[name]
        # A host that is taken away drains meanwhile; the next is not before that is over.
        assert spec["behavior"]["scaleDown"]["policies"][0]["periodSeconds"] >= config.agent_loop.drain_s
    (adapter,) = documents(K8S / "adapter-values.yaml")
    assert {rule["name"]["as"] for rule in adapter["rules"]["external"]} == {"packtrain_work"}


def test_overlays_have_configurations_that_load_and_fit(config: RunConfig) -> None:
    example = load(K8S / "overlays/example/run.toml")
    (settings,) = documents(K8S / "overlays/example/kustomization.yaml")
    assert settings["replicas"] == [{"name": "trainer", "count": example.batch.sizes.packers}]
    assert any(f"value: {example.run} }}" in patch.get("patch", "") for patch in settings["patches"])
    kuberay = load(K8S / "overlays/kuberay/run.toml")
    (cluster,) = documents(K8S / "overlays/kuberay/raycluster.yaml")
    groups = {group["groupName"]: yaml.safe_load(group["rayStartParams"]["resources"]) for group in cluster["spec"]["workerGroupSpecs"]}  # fmt: skip
    wanted = {
        "agent-loop": kuberay.agent_loop.resources,
        **{pool.name: pool.resources for pool in kuberay.pools},
    }
    assert groups.keys() == wanted.keys()
    for group, resources in wanted.items():
        (own,) = set(resources) - {"CPU"}
        assert f'"{own}"' in groups[group]
    assert kuberay.metrics.bind.endswith(":0")  # many services in one pod
    # KubeRay goes by it in what it asks of Ray, and actors of a launcher with another Ray are refused.
    assert f"ray=={cluster['spec']['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()
    for other in (example, kuberay):
        assert (other.broker, other.store) == (config.broker, config.store)


def test_the_broker_has_the_replicas_that_runs_ask_for(config: RunConfig) -> None:
    (values,) = documents(K8S / "nats-values.yaml")
    assert values["config"]["cluster"]["replicas"] == config.broker.replicas
    assert values["podTemplate"]["patch"][0]["value"]["secret"]["secretName"] == "nats-users"
    (store,) = documents(K8S / "seaweedfs-values.yaml")
    assert store["s3"]["existingConfigSecret"] == "store-users"


def test_the_grader_gives_an_answer_that_is_one(tmp_path: Path, config: RunConfig) -> None:
    turns = [{"role": "user", "text": "2 + 2"}, {"role": "assistant", "text": " 4 "}]
    said = {"a-0": [{"turns": turns}], "a-1": []}
    (tmp_path / "group.json").write_text(json.dumps({"sequences": list(said)}))
    (tmp_path / "transcripts").mkdir()
    for name, contexts in said.items():
        (tmp_path / f"transcripts/{name}.json").write_text(
            json.dumps({"sequence": name, "contexts": contexts})
        )
    (grader,) = [source.grader for source in config.sources if source.grader.kind == "command"]
    mounted = PurePosixPath(grader.options["argv"][-1])
    assert mounted.parent == PurePosixPath("/etc/packtrain")
    done = subprocess.run(
        [sys.executable, str(BASE / mounted.name)], cwd=tmp_path, capture_output=True, check=True, timeout=30
    )
    answer = parse(done.stdout)
    assert [(each.sequence, each.quality) for each in answer.sequences] == [("a-0", 1.0), ("a-1", 1.0)]
