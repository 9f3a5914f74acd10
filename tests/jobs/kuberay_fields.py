"""The fields of KubeRay's RayJob (ray.io/v1, release 1.6) and of the pods in it that a job may use,
with their types: an unknown or misspelt one would be dropped in silence by the cluster. From
KubeRay's API reference and Kubernetes' core/v1."""

from __future__ import annotations

from typing import Any

QUANTITIES = {str: (str, int)}
MOUNT = {"name": str, "mountPath": str}
CONTAINER = {
    "name": str,
    "image": str,
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "workingDir": str,
    "env": [{"name": str, "value": str}],
    "envFrom": [{"secretRef": {"name": str, "optional": bool}}],
    "resources": {"requests": QUANTITIES, "limits": QUANTITIES},
    "volumeMounts": [MOUNT],
}
VOLUME = {
    "name": str,
    "persistentVolumeClaim?": {"claimName": str},
    "configMap?": {"name": str},
    "emptyDir?": {"medium": ("", "Memory"), "sizeLimit": str},
}
POD = {
    "spec": {
        "restartPolicy": ("Always", "OnFailure", "Never"),
        "securityContext": {"runAsUser": int, "runAsGroup": int, "fsGroup": int},
        "containers": [CONTAINER],
        "volumes": [VOLUME],
    }
}
GROUP = {"rayStartParams": {str: (str,)}, "template": POD}
JOB = {
    "apiVersion": ("ray.io/v1",),
    "kind": ("RayJob",),
    "metadata": {"name": str, "annotations": {str: (str,)}},
    "spec": {
        "entrypoint": str,
        "submissionMode": ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
        "suspend": bool,
        "backoffLimit": int,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "rayClusterSpec": {
            "rayVersion": str,
            "authOptions": {"mode": ("disabled", "token")},
            "headGroupSpec": GROUP,
            "workerGroupSpecs": [
                {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, **GROUP}
            ],
        },
    },
}
"""A `?` marks what may be left out; a tuple of types or values: one of these; `{str: ...}`: any
names."""


def check(value: object, wanted: Any = JOB, at: str = "RayJob") -> None:
    """Raises AssertionError with the path of the first field that does not belong, is missing, or
    has another type."""
    if isinstance(wanted, list):
        assert isinstance(value, list), at
        for index, item in enumerate(value):
            check(item, wanted[0], f"{at}[{index}]")
    elif isinstance(wanted, tuple):
        assert value in wanted or type(value) in wanted, f"{at} is {value!r}, not one of {wanted}"
    elif isinstance(wanted, type):
        assert type(value) is wanted, f"{at} is {value!r}, not {wanted.__name__}"
    elif str in wanted:
        assert isinstance(value, dict), at
        for name, item in value.items():
            check(item, wanted[str], f"{at}.{name}")
    else:
        assert isinstance(value, dict), at
        known = {name.rstrip("?"): inner for name, inner in wanted.items()}
        needed = {name for name in wanted if not name.endswith("?")}
        assert needed <= set(value) <= set(known), f"{at} has {sorted(value)}"
        for name, item in value.items():
            check(item, known[name], f"{at}.{name}")
