"""Training over two hosts: network namespaces of this machine, which share its disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.test_train import SCRIPT, metrics_of, small
from tests.worlds import run_main

NAMESPACE = ["unshare", "--map-root-user", "--net", "--pid", "--mount-proc", "--fork", "--kill-child", "bash", "-c"]
HOSTS = """
set -e
mount -t tmpfs none /run
ip netns add first
ip netns add second
ip link add eth-first type veth peer name eth-second
for host in first second; do
    ip link set eth-$host netns $host
    ip -n $host link set lo up
    ip -n $host link set eth-$host up
done
ip -n first addr add 10.9.0.1/24 dev eth-first
ip -n second addr add 10.9.0.2/24 dev eth-second
"""
RUN = """
start() {
    export GLOO_SOCKET_IFNAME=eth-$1
    taskset --cpu-list $3 ip netns exec $1 unshare --uts bash -c 'hostname $0 && exec "$@"' CALLED STARTER "${@:4}"
}
start second 1 $SECOND_CORES "$@" &
start first 0 $FIRST_CORES "$@"
"""
TORCHRUN = '"$TORCHRUN" --nnodes 2 --node-rank $2 --nproc-per-node 1 --master-addr 10.9.0.1 --master-port 29500 --'
VARIABLES = 'env RANK=$2 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.9.0.1 MASTER_PORT=29500 "$PYTHON"'


def why_not() -> str | None:
    if not all(map(shutil.which, ("unshare", "ip", "mount"))):
        return "needs unshare, mount and ip (apt-get install iproute2)"
    tried = subprocess.run([*NAMESPACE, HOSTS], capture_output=True, text=True)
    return f"no network namespaces here: {tried.stderr[-200:]}" if tried.returncode else None


@pytest.mark.parametrize(
    ("dispatch", "name", "starter"),
    [("static", "$1", TORCHRUN), ("on-demand", "both", VARIABLES)],
    ids=["static", "on demand"],
)
def test_two_hosts_train_as_one(text_model: str, tmp_path: Path, dispatch: str, name: str, starter: str) -> None:
    """The same digits where nothing depends on time, and the same tokens of the first step where it does. Each host has
    half of the cores, as a rank of one host has: the library's sums may depend on the number of threads. Containers of
    one host may have one name, but no loopback address in common; what starts them may set torchrun's variables itself.
    """
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "vowels.py").write_text(
        "def score(completions, **_):\n    return [float(sum(map(ord, one)) % 3 > 0) for one in completions]\n"
    )
    options = ["--deterministic"] if dispatch == "static" else ["--dispatch", "on-demand", "--rollout.dtype", "float64"]
    options += ["--reward", f"{tmp_path / 'vowels.py'}:score", "--steps", "2", "--eval-every", "0"]
    run = small(Path(text_model), tmp_path / "runs", *options)
    one = Path(run_main("train", [*run, "--name", "one"], num_ranks=2)["run_dir"])
    how = RUN.replace("CALLED", name).replace("STARTER", starter)
    command = [*NAMESPACE, HOSTS + how, "bash", SCRIPT, *run, "--name", "two"]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    paths = {"TORCHRUN": str(Path(sys.executable).parent / "torchrun"), "PYTHON": sys.executable}
    mine = [*map(str, sorted(os.sched_getaffinity(0)))] * 2
    half = len(mine) // 4 or 1
    cores = {"FIRST_CORES": ",".join(mine[:half]), "SECOND_CORES": ",".join(mine[half : 2 * half])}
    env = kept | paths | cores | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    two = Path(json.loads(done.stdout.splitlines()[-1])["run_dir"])
    if dispatch == "static":
        assert metrics_of(one) == metrics_of(two) and len(metrics_of(two)) == 2
        assert any(row.get("actor/grad_norm") for row in metrics_of(two)), "something was learned from"
    firsts = [json.loads((folder / "lengths.jsonl").read_text().splitlines()[0]) for folder in (one, two)]
    assert firsts[0]["digest"] == firsts[1]["digest"]
