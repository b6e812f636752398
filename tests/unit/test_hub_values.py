"""The two forms of a class say the same, and neither gives a learner a right that is not needed.

No chart and no cluster here. The chart hands ``singleuser`` to KubeSpawner under other names,
:data:`TRAITS`; the pod that the real KubeSpawner makes of it is what is looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

HUB = Path(__file__).parents[2] / "docker" / "hub"
VALUES: dict[str, Any] = yaml.safe_load((HUB / "values.yaml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((HUB / "compose.yaml").read_text())

# The chart's keys that we use (its values.schema.yaml refuses all others), as paths.
CHART_KEYS = {
    "hub.config",
    "singleuser.allowPrivilegeEscalation",
    "singleuser.cloudMetadata.blockWithIptables",
    "singleuser.cloudMetadata.ip",
    "singleuser.cmd",
    "singleuser.cpu.guarantee",
    "singleuser.cpu.limit",
    "singleuser.defaultUrl",
    "singleuser.fsGid",
    "singleuser.image.name",
    "singleuser.image.pullPolicy",
    "singleuser.image.tag",
    "singleuser.memory.guarantee",
    "singleuser.memory.limit",
    "singleuser.networkPolicy.egressAllowRules.cloudMetadataServer",
    "singleuser.networkPolicy.egressAllowRules.nonPrivateIPs",
    "singleuser.networkPolicy.egressAllowRules.privateIPs",
    "singleuser.networkPolicy.enabled",
    "singleuser.storage.capacity",
    "singleuser.storage.extraVolumeMounts",
    "singleuser.storage.extraVolumes",
    "singleuser.storage.homeMountPath",
    "singleuser.storage.type",
    "singleuser.uid",
    "cull.enabled",
    "cull.every",
    "cull.maxAge",
    "cull.timeout",
    "cull.users",
}
# KubeSpawner's name for a key of the chart's ``singleuser``.
TRAITS = {
    "allow_privilege_escalation": "allowPrivilegeEscalation",
    "cmd": "cmd",
    "cpu_guarantee": "cpu.guarantee",
    "cpu_limit": "cpu.limit",
    "default_url": "defaultUrl",
    "fs_gid": "fsGid",
    "mem_guarantee": "memory.guarantee",
    "mem_limit": "memory.limit",
    "uid": "uid",
    "volume_mounts": "storage.extraVolumeMounts",
    "volumes": "storage.extraVolumes",
}
# In a process of its own: KubeSpawner wants an event loop, and a cluster's address to know of.
MAKE_POD = """
import asyncio, json, sys
from jupyterhub.objects import Hub
from kubernetes_asyncio.client import ApiClient
from kubespawner import KubeSpawner
from traitlets.config import Config

async def pod():
    spawner = KubeSpawner(config=Config(json.load(sys.stdin)), _mock=True, hub=Hub())
    spawner.api_token = spawner.oauth_client_id = "x"
    async with ApiClient() as client:
        return client.sanitize_for_serialization(await spawner.get_pod_manifest())

print(json.dumps(asyncio.run(pod())["spec"]))
"""
CLUSTER = """
{apiVersion: v1, kind: Config, current-context: none,
 contexts: [{name: none, context: {cluster: none, user: none, namespace: class}}],
 clusters: [{name: none, cluster: {server: "https://127.0.0.1:1"}}],
 users: [{name: none, user: {token: none}}]}
"""


def value(path: str, of: dict[str, Any]) -> Any:
    """What stands at a path such as ``cpu.limit``."""
    for key in path.split("."):
        of = of[key]
    return of


def paths(tree: dict[str, Any], begin: str = "") -> set[str]:
    """The paths of all that is set; below ``hub.config`` the chart looks at nothing."""
    found: set[str] = set()
    for key, below in tree.items():
        path = f"{begin}{key}"
        deeper = isinstance(below, dict) and path != "hub.config"
        found |= paths(below, f"{path}.") if deeper else {path}
    return found


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The specification of a learner's pod, as KubeSpawner makes it."""
    single = VALUES["singleuser"]
    spawner = {trait: value(path, single) for trait, path in TRAITS.items()}
    spawner["image"] = f"{single['image']['name']}:{single['image']['tag']}"
    spawner |= VALUES["hub"]["config"]["KubeSpawner"]
    cluster = tmp_path_factory.mktemp("kube") / "config"
    cluster.write_text(CLUSTER)
    done = subprocess.run(
        [sys.executable, "-c", MAKE_POD],
        input=json.dumps({"KubeSpawner": spawner}),
        env={**os.environ, "KUBECONFIG": str(cluster)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    spec: dict[str, Any] = json.loads(done.stdout)
    return spec


def test_only_keys_that_the_chart_knows() -> None:
    assert paths(VALUES) == CHART_KEYS


def test_a_pod_is_as_the_restricted_standard_wants_it(pod: dict[str, Any]) -> None:
    """Pod Security Standards, "restricted": no privilege by any of its doors; and read-only."""
    assert not {"hostNetwork", "hostPID", "hostIPC"} & {key for key, on in pod.items() if on}
    assert {kind for one in pod["volumes"] for kind in one if kind != "name"} == {"emptyDir"}
    assert not pod.get("initContainers"), "the chart's own one is privileged"
    (container,) = pod["containers"]
    context = container["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] > 0
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not context.get("privileged")
    assert "hostPort" not in json.dumps(container["ports"])


def test_the_privileged_init_container_of_the_chart_is_off_and_the_policy_is_on() -> None:
    single = VALUES["singleuser"]
    assert single["cloudMetadata"]["blockWithIptables"] is False
    assert single["networkPolicy"]["enabled"] is True
    assert not any(single["networkPolicy"]["egressAllowRules"].values())


def test_nobody_can_log_in_until_somebody_has_decided_who() -> None:
    """The chart's own default takes any name with any password."""
    config = VALUES["hub"]["config"]
    assert config["JupyterHub"]["authenticator_class"] == "shared-password"
    assert "SharedPasswordAuthenticator" not in config


def test_both_forms_give_a_learner_the_same(pod: dict[str, Any]) -> None:
    """Limits, culling, image, places to write."""
    told = COMPOSE["services"]["hub"]["environment"]
    defaults = {name: str(text).partition(":-")[2].rstrip("}") for name, text in told.items()}
    single, cull = VALUES["singleuser"], VALUES["cull"]
    assert defaults["RDMALAB_MEMORY"] == single["memory"]["limit"]
    assert defaults["RDMALAB_CPUS"] == str(single["cpu"]["limit"])
    assert defaults["RDMALAB_IDLE_S"] == str(cull["timeout"])
    assert defaults["RDMALAB_AGE_S"] == str(cull["maxAge"])
    assert defaults["RDMALAB_IMAGE"].partition(":")[0] == single["image"]["name"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": 2.0, "memory": 1536 << 20}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp", "/cache"}
    assert single["storage"]["homeMountPath"] == "/work"
