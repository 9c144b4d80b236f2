"""Real slime with an EAGLE-3 drafter, a model of its own: training, checkpoints and the policy's bits."""

import functools
import json

import pytest
import test_slime
import torch
from small_eagle3 import write_drafter
from test_slime import OURS, run_ranks, worst

pytestmark = [*test_slime.pytestmark, pytest.mark.timeout(900)]
on_ranks = functools.partial(run_ranks, program="slime_eagle3.py")
STAGES = "--pipeline-model-parallel-size 2 --rollout-batch-size 2 --global-batch-size 4".split()
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel --rollout-batch-size 2 --global-batch-size 4".split()


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """The options of a recipe with a fresh drafter, for a policy of the shape of slime_ranks.py."""
    room = tmp_path_factory.mktemp("drafter")
    drafter = {"kind": "eagle3", "path": str(write_drafter(room / "drafter")), "warmup_steps": 0}
    settings = {"rlspec": {"drafter": drafter, "candidate_steps": [0, 1, 3]}}
    (room / "eagle3.yaml").write_text(json.dumps(settings))
    return *OURS, "--custom-config-path", str(room / "eagle3.yaml")


def trained(ranks):
    """Return the drafter after two steps, by a rank of the last pipeline stage that has all of it."""
    found = ranks[-1]
    for losses, _ in found["steps"]:
        assert losses["drafter_skipped"] == 0 and losses["drafter_grad_norm"] > 0 and losses["drafter_tokens_k3"] >= 1
    assert not [n for n, v in found["drafter"].items() if torch.equal(v, found["before"][n])]
    return found


def test_policy_is_updated_as_without_a_drafter(options):
    for bare, rank in zip(on_ranks("plain", 2), on_ranks("step", 2, *options), strict=True):
        assert [norm for _, norm in bare["steps"]] == [norm for _, norm in rank["steps"]]
        assert not [n for n, v in bare["parameters"].items() if not torch.equal(v, rank["parameters"][n])]


def test_drafter_learns_the_same_on_split_sequences(options):
    whole, split = (trained(on_ranks("step", cp, *options)) for cp in (1, 2))
    for (one, _), (other, _) in zip(whole["steps"], split["steps"], strict=True):
        for name in ("drafter_loss_1", "drafter_loss_3", "drafter_grad_norm", "drafter_tokens_k3"):
            assert other[name] == pytest.approx(one[name], rel=1e-4), name
    assert worst(split["drafter"], whole["drafter"]) < 1e-3


def test_two_pipeline_stages_train_the_drafter_as_one_does(options):
    """The drafter reads the inputs of both layers, one of which is on the first stage, and its embedding."""
    one, stages = (on_ranks("step", 1, *options, *more, replicas=n) for more, n in (((), 1), (STAGES, 2)))
    for bare, rank in zip(on_ranks("plain", 1, *STAGES, replicas=2), stages, strict=True):
        assert [norm for _, norm in bare["steps"]] == [norm for _, norm in rank["steps"]]
        assert not [n for n, v in bare["parameters"].items() if not torch.equal(v, rank["parameters"][n])]
    whole, last = trained(one), trained(stages)
    for (ours, _), (theirs, _) in zip(last["steps"], whole["steps"], strict=True):
        drafters = {name: value for name, value in theirs.items() if name.startswith("drafter_")}
        assert {name: ours[name] for name in drafters} == pytest.approx(drafters, rel=1e-5, nan_ok=True)
    assert worst(last["drafter"], whole["drafter"]) < 1e-5
    first = stages[0]
    assert not first["drafter"] and not first["steps"][0][0]
    for rank in stages:  # a colocated push sends from each
        assert worst(rank["sent"], whole["sent"]) < 1e-5
    assert not [name for name, tensor in first["sent"].items() if not torch.equal(tensor, last["sent"][name])]


def test_parts_that_are_whole_stay_equal_where_matrices_are_split(options):
    """The policy of this test has other weights than on one rank, so only ranks are compared."""
    without = on_ranks("plain", 1, *TENSOR, replicas=2)
    both = on_ranks("step", 1, *options, *TENSOR, replicas=2)
    for bare, rank in zip(without, both, strict=True):
        assert not [n for n, v in bare["parameters"].items() if not torch.equal(v, rank["parameters"][n])]
    one, other = (trained([rank])["drafter"] for rank in both)
    whole = [name for name in one if "norm" in name or "fc.weight" in name or "eagle_output_layer" in name]
    assert len(whole) == 6 and not [name for name in whole if not torch.equal(one[name], other[name])]
    assert both[0]["steps"][1][0] == both[1]["steps"][1][0]


def test_drafter_resumes_from_slimes_checkpoint_and_can_be_served(options):
    """slime's own save and load. The policy's moments start anew, as in `slime_ranks.resumed`; the drafter's do not."""
    found = on_ranks("resumed", 1, *options, *STAGES, replicas=2)[-1]
    assert found["through"] and not [n for n, v in found["through"].items() if not torch.equal(v, found["resumed"][n])]
    assert not any(torch.equal(v, found["loaded"][n]) for n, v in found["through"].items())
    assert found["config"]["architectures"] == ["LlamaForCausalLMEagle3"]
    sent = {name.removeprefix("eagle3."): tensor for name, tensor in found["sent"].items()}
    assert found["written"].keys() == {*sent, "d2t", "t2d"}
    assert not [name for name, tensor in sent.items() if not torch.equal(tensor, found["written"][name])]
