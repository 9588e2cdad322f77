"""A launch as text, for whoever starts it: the line for each node, a Slurm script, or Kubernetes objects."""

import json
from typing import Literal

from slipstream.launch.command import Command, Launch
from slipstream.launch.nodes import Place
from slipstream.launch.settings import ServerName
from slipstream.launch.spread import beside_program, node_command, ray_command, spread

Form = Literal["lines", "slurm", "kubernetes"]
IMAGES: dict[ServerName, str] = {
    "vllm": "vllm/vllm-openai:latest",
    "sglang": "lmsysorg/sglang:latest",
    "slipstream": "slipstream",
}
_RANK, _ADDRESS, _FIRST = "@RANK@", "@ADDRESS@", "@FIRST@"
"""Stand for what only the running job knows; none of them needs quotes in a shell."""
_RAY_JOINED = """until {} status --address {} | awk '/^Active:/ {{on = 1; next}} /^[^ ]/ {{on = 0}} on {{count += $1}} \
    END {{exit count < {}}}'; do sleep 2; done"""


def manifest(launch: Launch, form: Form, devices: int) -> str:
    """Return how a launch is started elsewhere.

    Args:
        devices: GPUs of each node that it takes.
    """
    if form == "lines":
        return _lines(launch)
    return _slurm(launch, devices) if form == "slurm" else _kubernetes(launch, devices)


def _lines(launch: Launch) -> str:
    processes = spread(launch)
    parts = []
    for process in (*processes.cluster, *processes.server):
        where = "here" if process.node is None else f"on {process.node.name}"
        parts.append(f"# {where}\n{process.command.shell()}\n")
    return "\n".join(parts)


def _slurm(launch: Launch, devices: int) -> str:
    variables = {_RANK: '"$SLURM_NODEID"', _ADDRESS: '"$ADDRESS"', _FIRST: '"$FIRST"'}
    gpus = [f"#SBATCH --gpus-per-node={devices}"] if devices else []
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name={launch.server}",
            f"#SBATCH --nodes={_count(launch)}",
            "#SBATCH --ntasks-per-node=1",
            *gpus,
            "#SBATCH --exclusive",
            "export FIRST=$(hostname -I | awk '{print $1}')  # this script runs on the first node",
            f'echo "{launch.server} will answer at http://$FIRST:{launch.port}"',
            "# One task on each node; all of them end when one does.",
            "srun --kill-on-bad-exit=1 --wait=10 bash -c '",
            "# The address by which the first node reaches this one.",
            'ADDRESS=$(ip -o route get "$FIRST" | sed "s/.* src \\([^ ]*\\).*/\\1/")',
            _by_rank(launch, variables, '"$SLURM_NODEID"').replace("'", "'\\''"),
            "'",
            "",
        ]
    )


def _kubernetes(launch: Launch, devices: int) -> str:
    """Return a headless Service and a StatefulSet, whose pods are numbered and named: core objects of any cluster."""
    name = f"{launch.server}-serve"
    variables = {_RANK: '"$RANK"', _ADDRESS: '"$POD_IP"', _FIRST: '"$FIRST"'}
    script = "\n".join(
        [
            "RANK=${HOSTNAME##*-}",
            f"FIRST={name}-0.{name}",
            _by_rank(launch, variables, '"$RANK"'),
        ]
    )
    container: dict[str, object] = {
        "name": launch.server,
        "image": launch.image or IMAGES[launch.server],
        "command": ["/bin/sh", "-c", script],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"containerPort": launch.port}],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if devices:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(devices)}}
    labels = {"app": name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        # Pods have to find each other before they are ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
    }
    pods = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "serviceName": name,
            "replicas": _count(launch),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]},
            },
        },
    }
    # JSON is YAML, and has one spelling; models have to be in the image, on a volume, or on a hub.
    return "\n---\n".join(json.dumps(part, indent=2, ensure_ascii=False) for part in (service, pods)) + "\n"


def _by_rank(launch: Launch, variables: dict[str, str], rank: str) -> str:
    """Return shell text that runs each node's command, told apart by its rank."""
    if launch.nodes is None:
        return _text(spread(launch).server[0].command, {})
    spread(launch)  # refuses what cannot be
    first, other = (
        Place(_RANK, _count(launch), _ADDRESS, _FIRST, launch.nodes.port, is_first) for is_first in (True, False)
    )
    if launch.nodes.cluster == "ray":
        head, worker = (_text(ray_command(launch, place), variables) for place in (first, other))
        server = _text(node_command(launch, first), variables)
        joined = _RAY_JOINED.format(beside_program(launch, "ray"), f"{variables[_FIRST]}:{first.port}", first.count)
        return f"if [ {rank} = 0 ]; then\n{head} &\n{joined}\n{server}\nelse\n{worker}\nfi"
    head, worker = (_text(node_command(launch, place), variables) for place in (first, other))
    return f"if [ {rank} = 0 ]; then\n{head}\nelse\n{worker}\nfi"


def _text(command: Command, variables: dict[str, str]) -> str:
    text = command.shell()
    for token, variable in variables.items():
        text = text.replace(token, variable)
    return text


def _count(launch: Launch) -> int:
    return 1 if launch.nodes is None else len(launch.nodes.hosts)
