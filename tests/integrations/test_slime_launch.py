"""`rlspec slime`: what is added to a command, what stays, and what is refused."""

import json
import shlex

import pytest
import yaml
from weight_oracles import mimo_checkpoint

from megatron_rlspec.config import ConfigError, DrafterConfig
from megatron_rlspec.conversion.drafter_files import make_drafter
from megatron_rlspec.integrations.slime import launch
from megatron_rlspec.integrations.slime.engines import after_push
from megatron_rlspec.integrations.slime.flags import read_flags
from megatron_rlspec.integrations.slime.plan import FUNCTIONS, ONE_DEPTH, plan
from megatron_rlspec.models.hf_files import write_hf

DRAFTER = DrafterConfig()
EAGLE3 = {"kind": "eagle3", "path": "/a"}


def planned(command="", **drafter):
    return plan(command.split(), DrafterConfig(**drafter), (0, 1, 3))


def test_hooks_and_speculation_are_filled_in():
    given = read_flags(planned().flags)
    assert given["--mtp-num-layers"] == "1"
    assert given["--sglang-speculative-algorithm"] == "EAGLE"
    assert given["--sglang-speculative-num-draft-tokens"] == "4"
    assert set(FUNCTIONS) <= set(given)


def test_an_eagle3_drafter_needs_no_mtp_layer():
    added = planned("--sglang-speculative-algorithm EAGLE3", **EAGLE3)
    given = read_flags(added.flags)
    assert "--mtp-num-layers" not in given
    assert given["--sglang-speculative-draft-model-path"] == "/a"
    assert "--sglang-speculative-algorithm" not in given  # the user's own
    assert added.settings["drafter"]["kind"] == "eagle3" and added.settings["drafter"]["path"] == "/a"
    assert read_flags(planned(**EAGLE3).flags)["--sglang-speculative-algorithm"] == "EAGLE3"


def test_the_users_own_hooks_are_kept_and_called():
    mine = "--mtp-num-layers 1 --sglang-speculative-num-steps 3 --rollout-function-path my.rollout"
    added = planned(mine)
    given = read_flags(added.flags)
    assert "--mtp-num-layers" not in given and "--sglang-speculative-num-steps" not in given
    assert added.settings["user_functions"] == {"--rollout-function-path": "my.rollout"}
    assert given["--rollout-function-path"].endswith("rollout.generate_rollout")


@pytest.mark.parametrize(
    ("command", "drafter", "message"),
    [
        ("--sglang-speculative-accept-threshold-single 0.9", {}, "single 0.9: accepts .* not draw; set 1.0"),
        ("--prefill-num-servers 2", {}, "never run with a drafter that is trained"),
        ("--sglang-speculative-use-rejection-sampling", {}, "needs probabilities of a first draft.*; remove the flag"),
        ("--sglang-speculative-algorithm EAGLE3", {}, "give --drafter.kind eagle3 for a drafter of its own; set EAGLE"),
        ("--mtp-num-layers 1", EAGLE3, "trains no MTP layer"),
        ("--sglang-speculative-draft-model-path /b", EAGLE3, "give it as --drafter.path; remove the flag"),
        ("--multi-latent-attention", {"depth": 2}, "--multi-latent-attention with depth=2: .*set --drafter.depth 1"),
        (
            "--num-experts 8 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 4",
            {},
            "needs --expert-model-parallel-size above 1",
        ),
    ],
)
def test_contradictions_are_refused_in_one_line(command, drafter, message):
    with pytest.raises(ConfigError, match=message) as error:
        planned(command, **drafter)
    assert "\n" not in str(error.value)


def test_a_file_of_engines_that_prefill_apart_is_refused(tmp_path):
    """Also if the number of drafts is fixed: then the engines themselves refuse nothing."""
    file = tmp_path / "engines.yaml"
    command = f"--sglang-enable-dp-attention --sglang-config {file}".split()
    for kind in ("regular", "prefill"):
        plan(command, DRAFTER, verifier="target_only")
        file.write_text(f"sglang: [{{name: prefill, server_groups: [{{worker_type: {kind}, num_gpus: 8}}]}}]")
    with pytest.raises(ConfigError, match=f"--sglang-config {file}: engines that prefill and decode apart"):
        plan(command, DRAFTER, verifier="target_only")


def test_a_push_to_no_engine_finds_nothing():
    assert after_push([], {"a": 1}, 1, bool)["health/incidents"] == 0


def test_the_verifier_reaches_engines_and_hooks():
    for verifier in ("target_only", "position_keyed"):
        added = plan([], DRAFTER, verifier=verifier)
        settings = json.loads(added.environment["RLSPEC_SGLANG"])
        assert settings["verifier"] == added.settings["verifier"] == verifier
        assert ("--sglang-sampling-backend" in added.flags) == (verifier == "position_keyed")
    assert settings["drafts"] == "coupled" and planned().settings["verifier"] == "position_keyed"


UNKEYED = {
    "--sglang-enable-dp-attention --sglang-dp-size 8": "never run with --sglang-enable-dp-attention",
    "--sglang-sampling-backend flashinfer": "samples without seeds; position_keyed expects pytorch",
}


@pytest.mark.parametrize(("command", "reason"), UNKEYED.items())
def test_engines_that_cannot_sample_by_seed_verify_as_sglang_does(command, reason):
    """With another sampler SGLang ends at a seed beside top-p or top-k."""
    added = plan(command.split(), DRAFTER)
    assert added.settings["verifier"] == "target_only"
    (note,) = [note for note in added.notes if "texts depend on drafts" in note]
    assert reason in note
    with pytest.raises(ConfigError, match=f"--verifier position_keyed: .*{reason}.*; give --verifier target_only"):
        plan(command.split(), DRAFTER, verifier="position_keyed")


def test_the_sglang_of_slimes_image_has_no_eagle3(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "version", lambda name: "0.5.15.post1")
    command = ["--folder", str(tmp_path), "--dry-run", "--", "python", "train.py"]
    with pytest.raises(ConfigError, match="0.5.15.post1 has no EAGLE-3 drafters"):
        launch.main(["--drafter.kind", "eagle3", "--drafter.path", "/a", *command])


@pytest.mark.parametrize("given", [None, [2]])
def test_the_number_of_steps_is_fixed_if_sglang_cannot_adapt_it(given):
    """The drafter is trained and pushed as usual, and one line reports that the number is fixed."""
    command = "--sglang-enable-dp-attention --sglang-dp-size 8 --sglang-speculative-num-steps 2".split()
    added = plan(command, DRAFTER, given, verifier="target_only")
    assert "--sglang-speculative-adaptive" not in added.flags and not added.adaptive
    assert set(FUNCTIONS) <= set(added.flags)
    assert added.settings["candidate_steps"] == [2]
    reason = f"under {command[0]} SGLang does not adapt it"
    assert added.notes == [f"the number of draft steps is fixed at 2: {reason}"]


def test_candidates_without_the_steps_at_the_start_are_refused():
    with pytest.raises(ConfigError, match=r"expected 3 among them, .*\(--sglang-speculative-num-steps\)"):
        plan([], DRAFTER, [0, 1])


def test_the_recipes_number_of_steps_is_used_at_the_start():
    added = plan(["--sglang-speculative-num-steps", "4"], DRAFTER)
    assert added.settings["candidate_steps"] == [0, 1, 2, 3, 4, 5] and not added.notes
    given = read_flags(added.flags)
    assert given["--sglang-speculative-num-draft-tokens"] == "5"
    assert read_flags(plan([], DRAFTER, [2]).flags)["--sglang-speculative-num-steps"] == "2"


@pytest.mark.parametrize("flag", ONE_DEPTH)
def test_depth_follows_from_the_attention_unless_it_is_given(flag):
    added = plan([flag], DRAFTER)
    assert added.settings["drafter"]["depth"] == 1
    assert f"the drafter is trained to depth 1: {flag} supports no other" in added.notes
    assert plan([], DRAFTER).settings["drafter"]["depth"] == 3


def test_an_adaptive_configuration_of_the_user_is_kept():
    added = planned("--sglang-speculative-adaptive-config mine.json")
    assert "--sglang-speculative-adaptive" in added.flags and not added.adaptive


def test_plain_command(tmp_path):
    command = shlex.split("python train_async.py --lr 1e-6")
    whole = launch.complete(command, planned("--lr 1e-6"), tmp_path / "files")
    assert whole[:4] == command
    given = read_flags(whole)
    settings = yaml.safe_load(open(given["--custom-config-path"]))["rlspec"]
    assert settings["drafter"]["depth"] == 3 and settings["drafter"]["lr"] == 1e-3
    assert settings["folder"] == str(tmp_path / "files")
    adaptive = json.load(open(given["--sglang-speculative-adaptive-config"]))
    assert adaptive == {"1": {"candidate_steps": [0, 1, 3]}}


@pytest.mark.parametrize("joined", [True, False])
def test_ray_job_gets_the_environment(tmp_path, joined):
    runtime = '{"env_vars": {"A": "1"}}'
    option = [f"--runtime-env-json={runtime}"] if joined else ["--runtime-env-json", runtime]
    command = ["ray", "job", "submit", *option, "--", "python3", "train.py"]
    whole = launch.complete(command, planned(), tmp_path)
    given = read_flags(whole)
    needed = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_CUMEM_ENABLE": "0"}
    assert json.loads(given["--runtime-env-json"])["env_vars"] == {"A": "1", **needed, **planned().environment}
    assert whole.index("train.py") > whole.index("--")


def test_what_the_user_set_for_nccl_and_python_reaches_the_workers(tmp_path):
    """The job's own variables override those of the shell, and both override the defaults."""
    shell = {"NCCL_CUMEM_ENABLE": "1", "PYTHONPATH": "/megatron", "HOME": "/home"}
    job = json.loads(launch.job_environment({}, shell)[launch.RAY_JOB])["runtime_env"]["env_vars"]
    assert job == {"NCCL_CUMEM_ENABLE": "1", "PYTHONPATH": "/megatron", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    inner = json.dumps({"runtime_env": {"env_vars": {"NCCL_CUMEM_ENABLE": "0", "PYTHONPATH": "/other"}}})
    job = json.loads(launch.job_environment({}, shell | {launch.RAY_JOB: inner})[launch.RAY_JOB])["runtime_env"]
    assert job["env_vars"]["NCCL_CUMEM_ENABLE"] == "0" and job["env_vars"]["PYTHONPATH"] == "/other"
    runtime = json.dumps({"env_vars": {"NCCL_CUMEM_ENABLE": "1"}})
    command = ["ray", "job", "submit", "--runtime-env-json", runtime, "--", "python3", "train.py"]
    whole = launch.complete(command, planned(), tmp_path)
    assert json.loads(read_flags(whole)["--runtime-env-json"])["env_vars"]["NCCL_CUMEM_ENABLE"] == "1"


@pytest.mark.parametrize(
    ("own", "command", "message"),
    [
        ("--candidate-steps 0", "train.py", "never drafts"),
        ("", "train.py --custom-config-path broken.yaml", "broken.yaml: not valid YAML"),
        ("", "train.py --custom-config-path list.yaml", "list.yaml: expected a mapping"),
        ("", "ray job submit --runtime-env env.yaml -- train.py", "Ray takes one of them"),
        ("", "ray job submit --runtime-env-json { -- train.py", "--runtime-env-json: not valid JSON"),
    ],
)
def test_a_mistake_is_one_line(own, command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"broken": "a: [1", "list": "- 1"}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        launch.main([*own.split(), "--dry-run", "--", *command.split()])


@pytest.mark.parametrize("shorter", [True, False])
def test_a_drafter_of_a_shorter_context_runs_in_slimes_engines(shorter, tmp_path, capsys):
    config, tensors = mimo_checkpoint(num_hidden_layers=4, eos_token_id=100, num_nextn_predict_layers=0)
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 512}
    write_hf(tmp_path / "model", config, tensors)
    stated = make_drafter(tmp_path / "model", tmp_path / "drafter", 16)
    changed = stated | {"max_position_embeddings": 64} if shorter else stated
    (tmp_path / "drafter/config.json").write_text(json.dumps(changed))
    ours = [
        "--drafter.kind",
        "eagle3",
        "--drafter.path",
        str(tmp_path / "drafter"),
        "--folder",
        str(tmp_path),
        "--dry-run",
    ]
    assert launch.main([*ours, "--", "python", "train.py", "--hf-checkpoint", str(tmp_path / "model")]) == 0
    assert ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1" in capsys.readouterr().out) == shorter


def test_a_frozen_drafter_and_one_of_its_own_reach_the_hooks(tmp_path):
    drafter = tmp_path / "b"
    command = ["python", "train.py"]
    ours = ["--drafter.train", "false", "--drafter.kind", "eagle3", "--drafter.path", str(drafter)]
    ours += ["--folder", str(tmp_path), "--dry-run"]
    assert launch.main([*ours, "--", *command]) == 0
    settings = yaml.safe_load((tmp_path / "slime.yaml").read_text())["rlspec"]["drafter"]
    assert settings["train"] is False and settings["path"] == str(drafter)
    with pytest.raises(ConfigError, match="drafter.lr"):
        launch.main(["--drafter.train", "false", "--drafter.lr", "1e-4", "--", *command])
