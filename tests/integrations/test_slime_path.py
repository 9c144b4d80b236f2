"""slime's whole path without GPUs: its own train.py and train_async.py, under real Ray, on a real SGLang engine.

Needs what test_slime.py needs. `slime_path.py` is the program; what stands in for a GPU is in cpu_machine/.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.push.fingerprint import fingerprint

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.slime,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # two to three minutes on a quiet machine
    pytest.mark.skipif(
        not (os.environ.get("RLSPEC_SLIME") and os.environ.get("RLSPEC_SLIME_MEGATRON")),
        reason="set RLSPEC_SLIME and RLSPEC_SLIME_MEGATRON to checkouts: see tests/integrations/README.md",
    ),
]
_LINE = re.compile(r" (step|rollout|eval|perf) (\d+): (\{.*\})")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run slime_path.py with these options; return its folder, rollouts, and logged metrics.

    folder: of a run that goes on. Its metrics are then those after the resume.
    """

    @cache  # of a run that fails, too: it takes minutes
    def driver(*options, folder=None):
        folder = folder or tmp_path_factory.mktemp("path") / "run"
        command = [sys.executable, str(HERE / "slime_path.py"), str(folder), *options]
        env = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
        return folder, subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def start(*options, **again):
        folder, done = driver(*options, **again)
        assert done.returncode == 0, done.stdout[-5000:]
        logged = defaultdict(dict)
        for kind, number, metrics in _LINE.findall(done.stdout):
            values = ast.literal_eval(re.sub(r"\b(nan|inf)\b", "None", metrics))
            logged[kind, int(number)].update(values)
        rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
        return folder, rollouts, logged

    return start


# Two ranks of data parallelism, weights through the disk; and: every rollout drawn while the one before it trains, two
# ranks of context parallelism, two steps a rollout with slime's log-prob passes by actor and reference before them,
# weights through a process group, exported besides to compare with.
SYNCHRONOUS = ()
ASYNCHRONOUS = (
    "--driver=train_async.py",
    "--context=2",
    "--update-weight-transport=nccl",
    "--save-interval=1",
    "--save-hf=FOLDER/exported/{rollout_id}",
    "--use-kl-loss",
    "--kl-loss-coef=0.01",
    "--global-batch-size=16",
)
both = pytest.mark.parametrize("options", [SYNCHRONOUS, ASYNCHRONOUS], ids=["train", "train_async"])


# Each sample with a seed of its own, drafts with the verifier's noise.
KEYED = ("--verifier=position_keyed", "--rollouts=3")
# The same with the SGLang of slime's image, small: its kernels run in Triton's interpreter.
KEYED_OLD = (
    "--sglang=0.5.15.post1",
    "--verifier=position_keyed",
    "--rollouts=2",
    "--rollout-batch-size=2",
    "--over-sampling-batch-size=3",
    "--n-samples-per-prompt=4",
    "--global-batch-size=8",
    "--rollout-max-response-len=12",
)
OLD = pytest.mark.skipif(not os.environ.get("RLSPEC_SGLANG_OLD"), reason="RLSPEC_SGLANG_OLD")


def version_of(rollout, options):
    """Return the weight version of a rollout: the first update is number 1; an asynchronous rollout has one less."""
    return max(1, rollout) if options is ASYNCHRONOUS else rollout + 1


def exported(folder, version):
    """Return the checkpoint of this version, as slime's own conversion wrote it."""
    through_disk = folder / "weights" / f"weight_v{version:06d}"
    trained = folder / "exported" / str(version - 2)  # version 2 was trained on rollout 0
    return read_hf(through_disk if through_disk.exists() else trained if version > 1 else folder / "model")


def steps(logged):
    """Return what slime logged for each train step, in order."""
    return [metrics for (kind, _), metrics in sorted(logged.items()) if kind == "step"]


@both
def test_engines_hold_the_exported_policy_and_drafter(run, options):
    folder, rollouts, _ = run(*options)
    assert [row["rollout"] for row in rollouts] == [0, 1, 2, 3]
    for row in rollouts:
        latest = version_of(row["rollout"], options)
        assert int(row["versions"][-1]) <= latest
        _, tensors = exported(folder, latest)
        expected = {name: fingerprint(tensors[name]) for name in tensors}
        assert sum(".mtp_layers." in name for name in expected) == 16
        for engine in row["engines"]:
            assert engine["fingerprints"]["fingerprints"] == expected
    # slime generates more groups than it needs. On a slow machine all may end, and the next rollout consists of them.
    assert rollouts[0]["versions"] == ["1"] and rollouts[-1]["versions"][-1] != "1"


@both
def test_every_step_updates_policy_and_drafter(run, options):
    folder, rollouts, _ = run(*options)
    for version in range(1, len(rollouts) + 1):
        (_, before), (_, after) = exported(folder, version), exported(folder, version + 1)
        assert not [name for name in before if torch.equal(before[name], after[name])]


@both
def test_trainer_and_engine_give_each_token_the_same_probability(run, options):
    """Read slime's own metric, in float32, under speculation, for samples of the version that is trained."""
    _, rollouts, logged = run(*options)
    pure = [row["rollout"] for row in rollouts if row["versions"] == [str(row["rollout"] + 1)]]
    assert 0 in pure
    first_steps = steps(logged)[:: len(steps(logged)) // len(rollouts)]
    for rollout in pure:
        assert first_steps[rollout]["train/train_rollout_logprob_abs_diff"] < 1e-5


@both
def test_greedy_text_of_the_engine_is_the_argmax_of_the_exported_policy(run, options):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder, rollouts, _ = run(*options)
    for row in rollouts:
        config, tensors = exported(folder, version_of(row["rollout"], options))
        known = {k: v for k, v in config.items() if k not in ("auto_map", "model_type", "architectures")}
        model = Qwen2ForCausalLM(Qwen2Config(**known)).float().eval()
        model.load_state_dict({name: tensors[name].float() for name in tensors if ".mtp_layers." not in name})
        for prompt, text in row["greedy"]:
            with torch.no_grad():
                most = model(torch.tensor([prompt + text])).logits[0].argmax(-1).tolist()
            assert text == most[len(prompt) - 1 : -1]


@both
def test_drafter_learns_and_engines_accept_more(run, options):
    _, rollouts, logged = run(*options)
    loss = [step["train/drafter_loss_1"] for step in steps(logged)]
    assert len(loss) >= len(rollouts) and loss[-1] < 0.8 * loss[0]
    accepted = [row["accept_length"] for row in rollouts]  # of greedy text, three steps a round
    assert accepted[0] < 1.5 and accepted[-1] > 2


@both
def test_our_rule_decides_in_slimes_engine(run, options):
    _, rollouts, _ = run(*options)
    for engine in (engine for row in rollouts for engine in row["engines"]):
        assert engine["describe"]["controller"] == "DraftController"
        assert "off" in engine["describe"]["configs"]


@both
def test_engines_are_checked_and_get_rules_and_slime_logs_it(run, options):
    """After each push (of one through the disk, before the rollout that follows), and after each rollout."""
    folder, rollouts, logged = run(*options)
    ahead = int(options is ASYNCHRONOUS)
    for row in rollouts:
        found = logged["rollout", row["rollout"]]
        assert found["rollout/accept_length"] == 1 + row["drafts"] / row["rounds"]
        assert found["health/unreachable_engines"] == 0
        timed = found["rollout/spec_rounds"]
        assert timed > 0 or row["rollout"]  # a later rollout may consist of samples that an earlier one left over
        shares = sum(v for name, v in found.items() if name.startswith("rollout/spec_share"))
        assert shares == pytest.approx(float(timed > 0))
        assert ("predict/next_tokens_k3" in found) == (row["rollout"] > ahead)
    checks = [found for found in logged.values() if "health/incidents" in found]
    assert len(checks) == len(rollouts)
    assert all(c["health/incidents"] == 0 for c in checks)
    learnt = folder / f"save/iter_{rollouts[-1]['rollout']:07d}/rlspec-drafter/rollouts.json"
    assert json.loads(learnt.read_text())["acceptance"]["depth"] == 3


@pytest.mark.parametrize(
    ("options", "least"),
    [pytest.param(KEYED, 12, id="0.5.23"), pytest.param(KEYED_OLD, 4, id="0.5.15.post1", marks=OLD)],
)
def test_texts_follow_from_seeds_whatever_is_drafted(run, options, least):
    """Samples of slime's rollouts are drawn again with their seeds: with three drafts a round, and with none."""
    _, rollouts, logged = run(*options)
    again = [one for row in rollouts for one in row["again"]]
    assert all(row["again"] for row in rollouts) and len(again) >= least
    for text, off, drafted, *_ in again:
        assert text == off == drafted
    assert sum(text != other for text, _, _, other, *_ in again) > len(again) / 2
    # With three drafts a round fewer rounds are needed. slime logs what its rollouts accepted, where the rule drafts.
    last = rollouts[-1]["again"]
    off, drafted = (sum(rounds[-2 + i] for rounds in last) for i in range(2))
    assert drafted < 0.8 * off
    for row in rollouts:
        assert {engine["describe"]["drafts"] for engine in row["engines"]} == {"coupled"}
        found = logged["rollout", row["rollout"]]
        assert found["rollout/accept_length"] == 1 + row["drafts"] / row["rounds"]
        assert found["health/incidents"] == found["health/unreachable_engines"] == 0


def test_training_predicts_the_acceptance_of_coupled_drafts(run):
    _, rollouts, logged = run(*KEYED)
    assert all("train/drafter_tokens_k3" in step for step in steps(logged))
    assert all("predict/next_tokens_k3" in logged["rollout", row["rollout"]] for row in rollouts[1:])


@pytest.mark.parametrize("layout", [(), ("--pipeline-model-parallel-size=2",)], ids=["replicas", "stages"])
def test_an_eagle3_drafter_learns_is_pushed_and_saved(run, layout):
    """Its tensors are in each full update through the disk, beside those of slime's model."""
    folder, rollouts, logged = run("--kind=eagle3", "--rollouts=3", *layout)
    assert [row["rollout"] for row in rollouts] == [0, 1, 2]
    for row in rollouts:
        _, tensors = exported(folder, row["rollout"] + 1)
        expected = {name: fingerprint(tensors[name]) for name in tensors}
        assert sum(name.startswith("eagle3.") for name in expected) == 13
        for engine in row["engines"]:
            assert engine["fingerprints"]["fingerprints"] == expected
        found = logged["rollout", row["rollout"]]
        assert found["health/incidents"] == found["health/unreachable_engines"] == 0
    loss = [step["train/drafter_loss_1"] for step in steps(logged)]
    assert loss[-1] < 0.8 * loss[0]
    assert rollouts[-1]["accept_length"] > rollouts[0]["accept_length"]
    _, last = exported(folder, len(rollouts) + 1)
    _, saved = read_hf(folder / "save/iter_0000002/rlspec-drafter/hf_drafter")
    assert all(
        torch.equal(saved[name.removeprefix("eagle3.")], last[name]) for name in last if name.startswith("eagle3.")
    )


# A step of 128 samples a rollout. slime's filter leaves groups of equal rewards out, so 1/8 is the least reward.
MIXTURE = (
    "--kind=mixture",
    "--modulus=2",
    "--rollout-batch-size=16",
    "--over-sampling-batch-size=20",
    "--global-batch-size=128",
    "--lr=5e-3",
    "--save-interval=1",
)


def test_a_mixture_with_split_experts_learns_is_pushed_and_goes_on(run):
    """A GLM4-MoE with a NextN drafter: its experts are split over both train ranks, and a second run continues."""
    folder, rollouts, logged = run(*MIXTURE, "--rollouts=3")
    check_mixture(folder, rollouts, logged, first=0)
    loss = [step["train/drafter_loss_1"] for step in steps(logged)]
    assert loss[-1] < 0.9 * loss[0]
    saved = dict(exported(folder, 4)[1])  # read now: the second run writes this version again
    more = ("--rollouts=6", "--override-opt_param-scheduler")  # whose steps follow from the number of rollouts
    _, rollouts, logged = run(*MIXTURE, *more, folder=folder)
    check_mixture(folder, rollouts[3:], logged, first=3)
    _, resumed = exported(folder, 1)  # versions are counted anew
    assert all(torch.equal(resumed[name], saved[name]) for name in saved)
    assert all(step["train/drafter_loss_1"] < 0.9 * loss[0] for step in steps(logged))
    reward = [row["reward"] for row in rollouts]
    assert reward[-1] > 0.35 and reward[-1] > reward[0] + 0.1, reward  # about 0.17 without learning


def test_more_drafts_of_a_mixture_are_accepted_while_the_policy_stands_still(run):
    """The accept length is of greedy text, three steps a round. With a policy that learns it depends on that text."""
    _, rollouts, _ = run(*MIXTURE, "--rollouts=4", "--lr=0")
    accepted = [row["accept_length"] for row in rollouts]
    assert all(row["steps"] == [3] for row in rollouts)
    assert accepted[-1] > 1.3 * accepted[0], accepted


def check_mixture(folder, rollouts, logged, first):
    """Check the rollouts of a process, whose first one is number `first`, and the weights before and after each."""
    assert [row["rollout"] for row in rollouts] == [*range(first, first + len(steps(logged)))]
    for version, row in enumerate(rollouts, 1):
        (_, sent), (_, trained) = exported(folder, version), exported(folder, version + 1)
        assert sum(".mlp.experts." in name for name in sent) == 2 * 4 * 3  # a layer and the drafter; gate, up, down
        for engine in row["engines"]:
            assert engine["fingerprints"]["fingerprints"] == {n: fingerprint(tensor) for n, tensor in sent.items()}
        found = logged["rollout", row["rollout"]]
        assert found["health/incidents"] == 0
        learns = [name for name in sent if not name.endswith("e_score_correction_bias")]
        assert not [name for name in learns if torch.equal(sent[name], trained[name])]
