"""Real slime with experts split over ranks: one step with and without expert parallelism, and a resume."""

import pytest
import test_slime
import torch
from test_slime import OURS, drafter, policy, run_ranks, worst

pytestmark = test_slime.pytestmark

MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-layer-freq [0,1] "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --moe-router-dtype fp32"
)
SPLIT = "--expert-model-parallel-size 2"


def is_expert(name):
    return ".local_experts." in name


def joined(ranks, field):
    """Join the drafter's parameters or gradients of all ranks; those that both ranks have must agree bit for bit."""
    both = {}
    for rank in ranks:
        for name, value in drafter(rank[field]).items():
            assert name not in both or torch.equal(both[name], value), f"{name} differs between ranks"
            both[name] = value
    return both


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Options under which the drafter's clip acts, on experts."""
    file = tmp_path_factory.mktemp("experts") / "clip.yaml"
    file.write_text("rlspec: {drafter: {warmup_steps: 0}}\n")
    return "--clip-grad", "0.01", "--custom-config-path", str(file), *MOE.split()


@pytest.mark.timeout(900)
def test_drafter_learns_as_with_whole_experts(options):
    """Both replicas have the same batches. Norms and dense weights are equal on both ranks: one clip factor for all."""
    whole = run_ranks("one_step", 1, *OURS, *options, replicas=2)
    split = run_ranks("one_step", 1, *OURS, *options, *SPLIT.split(), replicas=2)
    norms = [rank["losses"]["drafter_grad_norm"] for rank in (*whole, *split)]
    assert norms[2] == norms[3] > 0.01
    assert norms[2] == pytest.approx(norms[0], rel=1e-5)
    gradients = [joined(ranks, "gradients") for ranks in (split, whole)]
    assert len([name for name in gradients[0] if is_expert(name)]) == 8
    assert worst(*gradients) < 5e-6
    assert worst(*(joined(ranks, "parameters") for ranks in (split, whole))) < 1e-4
    for name, value in whole[0]["losses"].items():
        assert split[0]["losses"][name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.timeout(900)
def test_policy_is_updated_as_without_a_drafter(options):
    without = run_ranks("no_drafter", 1, *options, *SPLIT.split(), replicas=2)
    ours = run_ranks("one_step", 1, *OURS, *options, *SPLIT.split(), replicas=2)
    for bare, rank in zip(without, ours, strict=True):
        assert bare["norm"] == rank["norm"]
        assert not [n for n, v in bare["parameters"].items() if not torch.equal(v, policy(rank["parameters"])[n])]


@pytest.mark.timeout(900)
def test_every_rank_resumes_with_its_own_experts():
    ranks = run_ranks("resumed", 1, *OURS, *MOE.split(), *SPLIT.split(), replicas=2)
    experts = [{n for n in rank["through"] if n.startswith("mtp.") and is_expert(n)} for rank in ranks]
    assert len(experts[0]) == len(experts[1]) == 4 and not experts[0] & experts[1]
    for rank in ranks:
        through, resumed, lost = (drafter(rank[name]) for name in ("through", "resumed", "lost"))
        assert not [n for n, v in through.items() if not torch.equal(v, resumed[n])]
        assert not any(torch.equal(v, lost[n]) for n, v in through.items()), "the moments did not matter"
        assert rank["layout"]["expert"] == 2
        shards = [name.split("-pipeline")[0] for name in rank["files"] if "experts" in name]
        assert shards == ["drafter-experts-tensor0-expert0", "drafter-experts-tensor0-expert1"]
