"""A JobSet for Kubernetes (jobset.x-k8s.io/v1alpha2): a pod per host under torchrun; when one fails, all of them are made anew.

JobSet makes the headless service by which pods find the first of them. A pod that is evicted or preempted does not count as a failure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from phalanx.train.recipes import PORT, Job, Recipe, at_least

GROUP = "ranks"
"""Of the pods: the JobSet has one replicated job of this name."""
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTP]i?)?")
"""A Kubernetes quantity, as in 500m, 4 or 64Gi."""


@dataclass(frozen=True, kw_only=True)
class JobSet(Recipe):
    """Print a JobSet manifest for `kubectl apply` that trains with the options behind `-- train`."""

    image: str
    """Container image with Phalanx in it."""
    claim: str
    """Persistent volume claim, one that all pods may write (ReadWriteMany), for the run folder."""
    mount: str = "/runs"
    """Where it is mounted; the run folder is below it."""
    namespace: str | None = None
    """Left out: that of kubectl."""
    max_restarts: int = 10
    """Times that all pods are made anew after one has failed; evictions and preemptions do not count."""
    seconds: int = 180
    """What a pod that is told to end has to write a checkpoint."""
    cpu: str | None = None
    """Cores of a pod, as in 32."""
    memory: str | None = None
    """Memory of a pod, shared memory included, as in 512Gi."""
    shared_memory: str = "16Gi"
    """Most that a pod's ranks may share in /dev/shm."""
    gpu: str = "nvidia.com/gpu"
    """The resource that is a GPU."""


def script(job: Job, jobset: JobSet) -> str:
    """The manifest as YAML; raises ValueError for what Kubernetes would not take."""
    return yaml.safe_dump(manifest(job, jobset), sort_keys=False, width=120)


def manifest(job: Job, jobset: JobSet) -> dict[str, Any]:
    _check(job, jobset)
    first = f"{job.name}-{GROUP}-0-0.{job.name}"  # as JobSet names pods: set, group, job and pod in it; then the service
    sizes = {"cpu": jobset.cpu, "memory": jobset.memory, jobset.gpu: job.per_node if job.gpus else None}
    sizes = {name: str(size) for name, size in sizes.items() if size is not None}
    container = {
        "name": "torchrun",
        "image": jobset.image,
        "command": [
            *("torchrun", f"--nnodes={job.nodes}", f"--nproc-per-node={job.per_node}"),
            *("--node-rank=$(JOB_COMPLETION_INDEX)", f"--master-addr={first}", f"--master-port={PORT}"),
            *("--tee=3", f"--log-dir={job.folder}/logs/$(JOB_COMPLETION_INDEX)", "--no-python"),
            *(word.replace("$(", "$$(") for word in job.command),
        ],
        "env": [{"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(max(1, jobset.seconds - 10))}],
        **({"resources": {"limits": sizes}} if sizes else {}),
        "volumeMounts": [{"name": "runs", "mountPath": jobset.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": jobset.seconds,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": jobset.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": jobset.shared_memory}},
        ],
    }
    pods = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": {"spec": pod},
    }
    evicted = {"name": "evicted", "action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name, **({"namespace": jobset.namespace} if jobset.namespace else {})},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "failurePolicy": {"maxRestarts": jobset.max_restarts, "rules": [evicted]},
            "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": pods}}],
        },
    }


def _check(job: Job, jobset: JobSet) -> None:
    at_least(0, max_restarts=jobset.max_restarts)
    at_least(1, seconds=jobset.seconds)
    for name in ("claim", "namespace"):
        value = getattr(jobset, name)
        if value is not None and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", value):
            raise ValueError(f"{name} is {value!r}; a Kubernetes name is lower-case letters, digits and hyphens")
    for name in ("cpu", "memory", "shared_memory"):
        value = getattr(jobset, name)
        if value is not None and not QUANTITY.fullmatch(value):
            raise ValueError(f"{name.replace('_', '-')} is {value!r}; it is a quantity, as in 500m, 4 or 64Gi")
    folder, mount = PurePosixPath(job.folder), PurePosixPath(jobset.mount)
    if ".." in folder.parts or mount not in folder.parents:
        raise ValueError(
            f"out is {job.folder}, which is not below {mount}, where the claim {jobset.claim} is mounted: it would be lost with its pod. "
            f"Use --out {mount}/{folder.name}, or mount the claim elsewhere with --mount"
        )
