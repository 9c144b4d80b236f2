"""Real slime with and without our hooks: one step of slime's own `train_one_step` on one and two CPU ranks.

Needs a slime checkout, the Megatron-LM it pins with slime's patch applied, and an interpreter with slime's packages:
`RLSPEC_SLIME`, `RLSPEC_SLIME_MEGATRON` and, if it is not this one, `RLSPEC_SLIME_PYTHON`. tests/integrations/README.md
says how to make them.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_rlspec.host import ports

HERE = Path(__file__).parent
SLIME = os.environ.get("RLSPEC_SLIME")
MEGATRON = os.environ.get("RLSPEC_SLIME_MEGATRON")
PYTHON = os.environ.get("RLSPEC_SLIME_PYTHON", sys.executable)
HOOKS = "megatron_rlspec.integrations.slime.hooks"
OURS = ("--custom-megatron-init-path", f"{HOOKS}.init", "--custom-model-provider-path", f"{HOOKS}.model_provider")
UNCLIPPED = ("--clip-grad", "0")

pytestmark = [
    pytest.mark.slime,
    pytest.mark.skipif(
        not (SLIME and MEGATRON), reason="set RLSPEC_SLIME and RLSPEC_SLIME_MEGATRON to checkouts: see the docstring"
    ),
]


def environment():
    path = [MEGATRON, SLIME, str(HERE.parent.parent), str(HERE), str(HERE.parent / "rollout")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


def run(mode, cp, *extra, replicas=1):
    """Run `mode` of slime_ranks.py on `cp` context-parallel ranks per replica; return what rank 0 saved."""
    return run_ranks(mode, cp, *extra, replicas=replicas)[0]


@cache
def run_ranks(mode, cp, *extra, replicas=1, program="slime_ranks.py"):
    """Return what each rank saved."""
    size = cp * replicas
    with tempfile.TemporaryDirectory() as folder:
        port = ports.free_port(ports.JOBS)
        job = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [PYTHON, "-W", "ignore", str(HERE / program), mode, folder, str(cp), *extra]
        logs = [open(Path(folder, f"rank{rank}.log"), "w+") for rank in range(size)]
        ranks = [
            subprocess.Popen(
                command,
                env=environment() | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
            )
            for rank in range(size)
        ]
        while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
            time.sleep(0.2)
        for process in ranks:  # a rank that waits for one that failed would wait for ever
            if any(p.poll() for p in ranks) and process.poll() is None:
                process.kill()
        for process, log in zip(ranks, logs, strict=True):
            process.wait()
            log.seek(0)
            assert process.returncode in (0, -signal.SIGKILL), log.read()[-3000:]
        saved = [Path(folder, f"rank{rank}.pt") for rank in range(size)]
        return [torch.load(file, weights_only=False) for file in saved if file.exists()]


def policy(named):
    return {name: value for name, value in named.items() if not name.startswith("mtp.")}


def drafter(named):
    return {name: value for name, value in named.items() if name.startswith("mtp.")}


def worst(a, b):
    assert a.keys() == b.keys() and a
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in a)


def test_policy_is_updated_as_without_a_drafter():
    """Compare with slime whose model has no MTP layer; slime's clipping is on."""
    without = run("no_drafter", 2)
    ours = run("one_step", 2, *OURS)
    assert not drafter(without["parameters"])
    changed = [n for n, v in without["parameters"].items() if not torch.equal(v, ours["parameters"][n])]
    assert not changed
    assert without["norm"] == ours["norm"]


def changed_by(with_drafter, without):
    """Count the elements of the policy's parameters that differ in some bit."""
    return sum(int((v != with_drafter["parameters"][n]).sum()) for n, v in without["parameters"].items())


@pytest.mark.timeout(600)
def test_policy_is_updated_as_without_a_drafter_on_three_replicas():
    """On two ranks a + b = b + a hides the order of a sum. On three, buffers shared with the drafter change it."""
    without = run("no_drafter", 1, *UNCLIPPED, replicas=3)
    assert changed_by(run("one_step", 1, *OURS, *UNCLIPPED, replicas=3), without) == 0
    assert changed_by(run("one_step", 1, *UNCLIPPED, replicas=3), without) > 0, "the control saw no difference"


def test_slimes_joint_clip_changes_the_policy():
    """The control: under slime's own clipping, the drafter's gradient is part of the policy's norm."""
    alone = run("one_step", 2)
    ours = run("one_step", 2, *OURS)
    assert alone["norm"] > 1.01 * ours["norm"]
    assert any(not torch.equal(v, policy(ours["parameters"])[n]) for n, v in policy(alone["parameters"]).items())


def test_drafter_gradient_is_that_of_our_own_loop():
    own = run("own_loop", 1)
    for cp in (1, 2):
        inside = run("one_step", cp, *OURS, *UNCLIPPED)
        assert worst(drafter(inside["gradients"]), own["gradients"]) < 5e-6
        for depth in (1, 2, 3):
            assert inside["losses"][f"drafter_loss_{depth}"] == pytest.approx(
                own["losses"][f"drafter/loss_{depth}"], rel=1e-5
            )


def test_depth_one_runs_through_megatrons_own_layer(tmp_path):
    """On a dense layer, the path of latent attention and mixtures of experts computes the same function at depth 1."""
    settings = tmp_path / "depth.yaml"
    settings.write_text("rlspec: {drafter: {depth: 1}}\n")
    inside = run("one_step", 1, *OURS, *UNCLIPPED, "--custom-config-path", str(settings))
    assert "drafter_loss_2" not in inside["losses"]
    assert inside["losses"]["drafter_loss_1"] == pytest.approx(run("own_loop", 1)["losses"]["drafter/loss_1"], rel=1e-5)
    assert all(bool(g.isfinite().all()) for g in drafter(inside["gradients"]).values())


def test_rank_without_response_tokens():
    """All twelve response tokens of 64 are on one of two ranks. slime alone divides 0 by 0 on the other."""
    with pytest.raises(AssertionError, match="found NaN in local grad norm"):
        run("empty_rank", 2)
    ours = run("empty_rank", 2, *OURS)
    assert all(bool(g.isfinite().all()) for g in ours["gradients"].values())
    assert ours["losses"]["drafter_skipped"] == 0


def test_drafter_resumes_from_slimes_checkpoint():
    """slime's own save and load, and one more step: the drafter has the bits of the run that was not interrupted.

    Of the policy only weights and scheduler are loaded (see `slime_ranks.resumed`).
    """
    found = run("resumed", 2, *OURS)
    through, resumed, lost = (found[name] for name in ("through", "resumed", "lost"))
    assert not [n for n, v in drafter(through).items() if not torch.equal(v, resumed[n])]
    assert not any(torch.equal(v, lost[n]) for n, v in drafter(through).items()), "the moments did not matter"


@pytest.mark.parametrize("patched", [False, True])
def test_patch_0001_gives_megatron_the_inputs_that_sglang_reads(patched, tmp_path):
    env = environment()
    if patched:
        shutil.copytree(Path(SLIME, "slime"), tmp_path / "slime")
        patches = sorted((HERE.parents[1] / "patches/slime/624b824a8").glob("*.patch"))
        subprocess.run(["git", "apply", *map(str, patches)], cwd=tmp_path, check=True)
        env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    command = [PYTHON, "-W", "ignore", str(HERE / "qwen3_next_projection.py")]
    env["SGLANG_USE_CPU_ENGINE"] = "1"
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (float(done.stdout.split()[-1]) < 1e-5) == patched
