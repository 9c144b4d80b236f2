"""Every option of `rlspec serve` changes what SGLang is started with, or is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import tiny_mimo
import torch

from megatron_rlspec.config import ConfigError
from megatron_rlspec.rollout.sglang.http import checks, serve
from megatron_rlspec.run import loading

CONFIG = tiny_mimo.config(hidden=64, layers=1, heads=4, kv_heads=2, ffn=64, vocab=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options")
    tiny_mimo.write(folder / "mimo", CONFIG, tiny_mimo.weights(CONFIG))
    return folder


def started(folder: Path, *more: str) -> tuple[list[str], str]:
    """Return SGLang's arguments and the plugin's settings. Raises ConfigError."""
    kept = mock.patch.dict(os.environ, {})
    inert = mock.patch.multiple(serve, _install_stand_ins=mock.DEFAULT, _launch=mock.DEFAULT)
    with kept, inert as calls:
        serve.main(["--model", str(folder / "mimo"), "--device", "cpu", *more])
        _, _, arguments = calls["_launch"].call_args.args
        slots = [Path(text.partition("=")[2]).read_text() for text in arguments if "adaptive-config" in text]
        return [*arguments, *slots], os.environ["RLSPEC_SGLANG"]


def test_options_change_what_is_started(folder: Path) -> None:
    arguments, settings = started(folder, "--num-steps", "2", "--candidate-steps", "0,2", "--verifier", "target_only")
    assert "--speculative-num-steps=2" in arguments and '"verifier": "target_only"' in settings
    arguments, _ = started(folder, "--spec", "off", "--max-total-tokens", "2048")
    assert "--max-total-tokens=2048" in arguments and not any("speculative" in text for text in arguments)


def test_weights_have_the_type_of_config_json(folder: Path, capsys) -> None:
    """SGLang's own default serves a float32 model in float16."""
    arguments, _ = started(folder)
    assert "--dtype=float32" in arguments
    assert "rlspec serve: loading mimo in float32\n" in capsys.readouterr().out
    assert "--dtype=bfloat16" in started(folder, "--dtype", "bfloat16")[0]


def test_the_type_of_the_tensors_counts_where_config_json_has_none(folder: Path, tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key not in ("dtype", "torch_dtype")}
    tiny_mimo.write(tmp_path / "model", config, tiny_mimo.weights(config))
    assert checks.dtype_of(tmp_path / "model") == "float32"


def test_print_shows_the_commands_of_sglangs_own_server(folder: Path, tmp_path: Path, capsys) -> None:
    serve.main(["--model", str(folder / "mimo"), "--print", "--mem-fraction-static", "0.8"])
    script = capsys.readouterr().out
    echo = script.replace("python -m sglang.launch_server", "printenv RLSPEC_SGLANG; echo")
    done = subprocess.run(["bash", "-c", echo], cwd=tmp_path, capture_output=True, text=True, check=True)
    settings, words = done.stdout.splitlines()
    assert settings == "1"
    assert {f"--model-path={folder / 'mimo'}", "--device=cuda", "--speculative-adaptive"} <= set(words.split())
    assert "--mem-fraction-static 0.8" in words and "--sampling-backend=pytorch" in words
    assert "--speculative-adaptive-config=rlspec-adaptive.json" in words
    assert 0 in json.loads((tmp_path / "rlspec-adaptive.json").read_text())["1"]["candidate_steps"]
    with pytest.raises(ConfigError, match="--print --device cpu: SGLang's own server needs a GPU for drafts"):
        serve.main(["--model", str(folder / "mimo"), "--print", "--device", "cpu"])


@pytest.mark.parametrize("project", ["verl", "miles"])
def test_for_a_project_its_own_settings_are_printed(folder: Path, project: str, tmp_path: Path, capsys) -> None:
    """The project's shell reads them: nothing is lost between quotes."""
    serve.main(["--model", str(folder / "mimo"), "--for", project])
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith(START_OF[project])]
    command = ["bash", "-c", f'for word in {" ".join(lines)}; do echo "$word"; done']
    echoed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    words = echoed.stdout.splitlines()
    file = f"{tmp_path}/rlspec-adaptive.json"
    expected = {
        "verl": {
            "+ray_kwargs.ray_init.runtime_env.env_vars.RLSPEC_SGLANG='1'",
            "actor_rollout_ref.model.mtp.enable_rollout=True",
            "actor_rollout_ref.model.mtp.speculative_algorithm=EAGLE",
            "actor_rollout_ref.model.mtp.speculative_num_draft_tokens=2",
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.speculative_adaptive=True",
            f"+actor_rollout_ref.rollout.engine_kwargs.sglang.speculative_adaptive_config={file}",
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.sampling_backend=pytorch",
        },
        "miles": {"--sglang-speculative-adaptive", f"--sglang-speculative-adaptive-config={file}"},
    }
    assert expected[project] <= set(words)
    with pytest.raises(ConfigError, match="--mem-fraction-static"):
        serve.main(["--model", str(folder / "mimo"), "--for", "verl", "--mem-fraction-static", "0.8"])


START_OF = {"verl": ("+", "actor_"), "miles": ("--sglang-",)}


@pytest.mark.parametrize(
    ("given", "useless"),
    [
        (["--spec", "off"], ["--num-steps", "2"]),
        (["--spec", "fixed"], ["--candidate-steps", "0,3"]),
        (["--verifier", "target_only"], ["--drafts", "argmax"]),
    ],
)
def test_an_option_without_effect_is_refused(given: list[str], useless: list[str], folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"{useless[0]} has no effect with {' '.join(given)}"):
        started(folder, *given, *useless)


@pytest.mark.parametrize("more", [[], ["--print"]], ids=["served", "printed"])
def test_options_of_sglang_that_drafts_never_ran_with_are_refused(folder: Path, more: list[str]) -> None:
    options = ["--model", str(folder / "mimo"), "--dp-size", "2", *more]
    with pytest.raises(ConfigError, match="--dp-size: not supported with drafts; remove it, or serve with --spec off"):
        serve.main(options)


@pytest.mark.parametrize("words", [["--hos", "0.0.0.0"], ["--por=30001"]])
def test_what_sglang_would_complete_to_an_option_of_ours_is_refused(words: list[str], capsys) -> None:
    with pytest.raises(SystemExit):
        serve.parsed(["--model", "m", *words])
    assert capsys.readouterr().err.startswith(f"rlspec serve: unknown option {words[0].split('=')[0]}; did you mean --")


def test_sglang_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang's package for GPUs on a machine without a driver, which says twenty lines."""
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints", None)
    with pytest.raises(ConfigError, match=r"^SGLang cannot be imported: .*setup_cpu\.sh\)$") as refused:
        serve._launch(serve.parser().parse_args(["--model", "x"]), "cpu", [])
    assert "\n" not in str(refused.value)


def test_gpus_that_torch_cannot_use_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is too old for torch's CUDA: NVML counts the GPUs, and CUDA has none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="cannot use the GPUs .* --device cpu"):
        serve._device("auto")
    assert serve._device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="cannot use the 8 GPUs of this machine; `rlspec doctor --gpu` says why"):
        loading.check_machine()
