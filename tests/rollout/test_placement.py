"""Which GPUs ranks and engines get, what does not fit, and the environments in which engines are started."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rlspec import memory_choices, memory_estimate
from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.memory_estimate import GIB, EngineMemory, RankMemory
from megatron_rlspec.rollout import placement
from megatron_rlspec.rollout.placement import GpuLayout, place, with_memory
from megatron_rlspec.rollout.sglang.client.transport import GroupBroadcast, Handles, Http
from megatron_rlspec.rollout.start import ServedEngines, engine_arguments
from megatron_rlspec.run import loading

RECIPES = Path(__file__).parents[2] / "examples/torchrun"

APART = "disaggregated"


@pytest.mark.parametrize(
    ("layout", "options", "way"),
    [
        (GpuLayout(), {}, Http),
        (GpuLayout(), {"push.transport": "group"}, GroupBroadcast),
        (GpuLayout("disaggregated", ("0",), (("1",),)), {}, GroupBroadcast),
        (GpuLayout("colocated", ("0",), (("0",),)), {}, Handles),
        (GpuLayout("colocated", ("0", "1"), (("0",), ("1",))), {}, GroupBroadcast),
    ],
    ids=["not placed", "asked for", "disaggregated", "one card", "two cards"],
)
def test_pushes_travel_as_the_engines_are_placed(layout, options, way, tmp_path):
    """An engine opens the memory of the only GPU. A group goes from GPU to GPU, or over gloo to shared ones."""
    transport = ServedEngines(load(None, options), tmp_path, layout)._transport
    assert type(transport) is way
    if way is GroupBroadcast and layout.colocated:
        assert transport.backend == "gloo"


@pytest.mark.parametrize(
    ("visible", "peers", "way"), [(2, True, Handles), (2, False, GroupBroadcast), (1, True, GroupBroadcast)]
)
def test_engines_on_all_cards_read_rank_0s_memory_if_they_can(monkeypatch, tmp_path, visible, peers, way):
    """There is no machine with two GPUs here, so torch's answers stand in for it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda reader, memory: peers and memory == 0)
    layout = GpuLayout("colocated", ("0", "1"), (("0",), ("1",)))
    assert isinstance(ServedEngines(load(None), tmp_path, layout)._transport, way)


@pytest.mark.parametrize(
    ("mode", "ranks", "seen"), [(APART, 4, ["4,5", "6,7"]), ("colocated", 8, ["0,1,2,3", "4,5,6,7"])]
)
def test_engines_see_their_own_gpus_and_no_others(mode, ranks, seen):
    tensor = 2 if mode == APART else 4
    layout = place("01234567", ranks, 2, tensor, mode)
    assert [layout.environment(i)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == seen
    given = engine_arguments(load(None, {"model.path": "m"}), layout)
    assert given[given.index("--tp") + 1] == str(tensor)
    assert ("--enable-memory-saver" in given) == ("--enable-draft-weights-cpu-backup" in given) == (mode != APART)
    off = engine_arguments(load(None, {"model.path": "m", "spec.mode": "off"}), layout)
    assert "--enable-draft-weights-cpu-backup" not in off
    assert GpuLayout().environment(3) == {} and "--tp" not in engine_arguments(load(None), GpuLayout())


@pytest.mark.parametrize(
    ("count", "ranks", "engines", "tensor", "mode", "line"),
    [
        (8, 4, 1, 2, APART, "8 GPUs less 4 trainer ranks leave 4, but rollout.engines=1 x placement.tensor=2 needs 2"),
        (8, 4, 1, 1, "colocated", "there are 4 ranks, and rollout.engines=1 x placement.tensor=1 needs 1"),
        (2, 3, 1, 1, "auto", "3 trainer ranks on a node of 2 GPUs, one for each rank; expected fewer"),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_come_out_even_is_refused(count, ranks, engines, tensor, mode, line):
    with pytest.raises(ConfigError) as refused:
        place([str(i) for i in range(count)], ranks, engines, tensor, mode)
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_run_places_its_ranks_and_engines_by_the_gpus_of_the_machine(monkeypatch):
    config = load(str(RECIPES / "mimo-7b-rl.toml"), {"rollout.engines": "4", "model.path": "m"})
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=80 << 30))
    held = SimpleNamespace(headers={"all": SimpleNamespace(shape=(7_800_000, 1_000))})
    layout = loading.place(config, MIMO, held)
    assert layout.train == tuple("0123") and layout.engines == (("4",), ("5",), ("6",), ("7",))
    assert 0.8 < layout.mem_fraction < 0.83
    elsewhere = load(None, {"rollout.urls": "http://127.0.0.1:30004", "model.path": "m"})
    assert loading.place(elsewhere, MIMO, SimpleNamespace(headers={})) == GpuLayout()


MIMO = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
MIMO |= {"vocab_size": 151_680, "intermediate_size": 11_008, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6}


def need_of(gpu, weights, trainer=0, fixed=0):
    """Return what `with_memory` takes, of sizes in GiB. A sample takes 1 GiB of KV cache."""
    engine = EngineMemory(1, weights * GIB, 1 << 17, 8192, cuda_graphs=fixed * GIB, attention=0, working=14 * GIB)
    return gpu * GIB, RankMemory(trainer * GIB, 0, 0), engine


@pytest.mark.parametrize(
    ("mode", "need", "expected"),
    [
        ("disaggregated", need_of(80, 15, 60), (0.82, 0)),  # 64 GiB of 78
        ("colocated", need_of(80, 15, 40), (0.562, 24576)),  # 18 GiB of 32
        ("colocated", need_of(80, 15, 60), "and 12.0 of 80.0 GiB are free, of which a trainer rank keeps 60.0"),
        ("disaggregated", need_of(24, 30), "need 31.0 GiB on each of its 1 GPUs, CUDA graphs, page tables, logits and "
         "prefills 14.0, and 22.0 of 24.0"),
    ],
)  # fmt: skip
def test_an_engine_gets_what_the_trainer_leaves(mode, need, expected):
    layout = place(("0", "1") if mode == "disaggregated" else ("0",), 1, 1, 1, mode)
    if isinstance(expected, tuple):
        placed = with_memory(layout, *need)
        assert (placed.mem_fraction, placed.max_total_tokens) == expected
        given = engine_arguments(load(None, {"model.path": "m"}), placed)
        assert given[given.index("--max-total-tokens") + 1] == str(expected[1])
        assert given[given.index("--mem-fraction-static") + 1] == str(expected[0])
        theirs = {"rollout.engine_options": "--attention-backend 'triton' --mem-fraction-static 0.4"}
        own = engine_arguments(load(None, {"model.path": "m", **theirs}), placed)
        assert own[-4:] == ["--attention-backend", "triton", "--mem-fraction-static", "0.4"]  # the last one counts
        return
    with pytest.raises(ConfigError) as refused:
        with_memory(layout, *need)
    assert expected in str(refused.value)


@pytest.mark.parametrize(("tensor", "theirs"), [(1, 0.83), (2, 0.829), (4, 0.826)])
def test_an_engine_gets_no_more_than_sglang_would_take(tensor, theirs):
    """`theirs` is the share of 80 GiB that SGLang 0.5.23 takes by itself, as its ServerArgs resolve it."""
    config = load(None, {"placement.tensor": str(tensor), "rollout.engines": "1"})
    engine = memory_estimate.engine_memory(config, MIMO, 80 * GIB, 7_800_000_000)
    ours = memory_estimate.engine_share(engine, 80 * GIB).mem_fraction
    assert theirs - 0.04 < ours <= theirs


def test_heads_that_gpus_cannot_share_are_refused():
    placement.check_heads({"num_attention_heads": 28, "num_key_value_heads": 4}, 4)
    with pytest.raises(ConfigError, match="placement.tensor=8 does not divide the model's 28 attention heads"):
        placement.check_heads({"num_attention_heads": 28, "num_key_value_heads": 4}, 8)
    with pytest.raises(ConfigError, match="multiple of the model's 4 key and value heads"):
        placement.check_heads({"num_attention_heads": 36, "num_key_value_heads": 4}, 6)


def test_visible_devices_keep_their_names():
    assert placement.devices({"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, 2) == ("GPU-a", "GPU-b")
    assert placement.devices({}, 3) == ("0", "1", "2") and placement.devices({}, 0) == ()
    assert place((), 1, 4, 2, "colocated") == GpuLayout()  # a machine without a GPU


def test_options_that_exclude_each_other():
    with pytest.raises(ConfigError, match="rollout.staleness=1 draws samples while training"):
        placement.check_colocated(staleness=1, overlap=False)
    with pytest.raises(ConfigError, match="push.transport"):
        load(None, {"push.transport": "files"})
    with pytest.raises(ConfigError, match="push.transport=handles is for memory of a GPU, and this machine has none"):
        ServedEngines(load(None, {"push.transport": "handles"}), Path(), GpuLayout())


def test_the_memory_of_a_token():
    token_bytes = memory_estimate.token_bytes
    assert token_bytes(load(None, {}), MIMO) == 2 * 37 * 8 * 128 * 2
    off = load(None, {"spec.mode": "off"})
    latent = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert token_bytes(off, latent) == 2304 and token_bytes(off, latent, 4) == 4 * 2304
    assert token_bytes(off, MIMO, 16) == 2 * 36 * 16 * 128 * 2  # every GPU has a head, and some the same one


def test_ranks_hold_their_share_of_the_experts():
    """8 ranks in two groups of 4 replicas: each holds a fourth of the experts, and every expert is stepped by 2."""
    config = load(None, {"parallel.expert": "4", "optimizer.distributed": "true"})
    trainer = memory_estimate.trainer_memory(config, MIMO, 8_800, 8_000, 8)
    assert trainer.total - trainer.activations == 2_800 * 6 + (100 + 1_000) * 12
    assert trainer.between_steps == 2_800 * 2 + (100 + 1_000) * 12  # gradients are freed while engines generate


QWEN3_8B = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
QWEN3_8B |= {"vocab_size": 151_936, "intermediate_size": 12_288, "head_dim": 128}
ANSWERS_OF_16K = {
    "model.max_length": "17408",
    "rollout.max_new_tokens": "16384",
    "train.tokens_per_micro_batch": "17408",
}
NODE = memory_choices.Hardware(gpus=8, gpu=int(79.2 * GIB), ranks=8, world=8)


def settled(options, machine=NODE, engines_open=True):
    """Return the configuration of a run of an 8B model with a drafter, its choices, and its layout."""
    config = memory_choices.with_distributed(load(None, ANSWERS_OF_16K | options), machine.world)
    fit = memory_choices.Fit(QWEN3_8B, 8_590_000_000, machine)
    config, lines = memory_choices.settled(config, fit, fit.rank(config), launches=True, engines_open=engines_open)
    gpus = [str(i) for i in range(machine.gpus)]
    layout = place(gpus, machine.ranks, config.rollout.engines, config.placement.tensor, "auto")
    return config, lines, with_memory(layout, machine.gpu, fit.rank(config), fit.engine(config))


SPLIT = {"parallel.tensor": "2", "parallel.sequence": "true"}


def test_an_8b_model_at_16k_fits_eight_gpus_with_what_the_run_chooses():
    config, lines, layout = settled(SPLIT)
    assert config.optimizer.distributed and config.parallel.recompute
    assert any(line.startswith("parallel.recompute=true: without it a rank needs about") for line in lines)
    assert layout.colocated and layout.estimated_kv_tokens * config.rollout.engines > 1_000_000
    assert layout.estimated_kv_tokens >= memory_estimate.needed_tokens(config, config.rollout.engines)
    assert "warning" not in memory_estimate.cache_line(config, layout.estimated_kv_tokens)


def test_adams_state_leaves_the_gpu_where_the_kv_cache_is_too_small_beside_it():
    many = SPLIT | {"rollout.engines": "8", "rollout.max_running_requests": "64", "rollout.prompts_per_step": "64"}
    config, lines, layout = settled(many, engines_open=False)
    kept, _, beside = settled(many | {"optimizer.offload": "false"}, engines_open=False)
    assert config.optimizer.offload and any(line.startswith("optimizer.offload=true: a step's") for line in lines)
    needed = memory_estimate.needed_tokens(config, 8)
    assert beside.estimated_kv_tokens < needed
    adam = 12 * 8_590_000_000 // 8  # two moments and a float32 weight, split over 8 ranks
    token = memory_estimate.token_bytes(config, QWEN3_8B)
    assert layout.estimated_kv_tokens == pytest.approx(beside.estimated_kv_tokens + adam / token, rel=1e-3)
    assert not settled(SPLIT)[0].optimizer.offload


def test_what_the_user_said_stays():
    given = SPLIT | {
        "parallel.tensor": "4",
        "rollout.engines": "2",
        "placement.tensor": "4",
        "optimizer.distributed": "false",
    }
    config, lines, layout = settled(given | {"parallel.recompute": "true"}, engines_open=False)
    assert not config.optimizer.distributed and config.parallel.recompute and not lines
    assert (config.rollout.engines, config.placement.tensor) == (2, 4)
    starved = memory_estimate.cache_line(config, 39_747)
    assert starved.startswith("KV cache of 39,747 tokens an engine: 2.3 samples of 17,408 tokens at once; warning: ")


def test_a_rank_that_cannot_fit_is_refused_before_engines_start():
    whole = {"optimizer.distributed": "false"}
    with pytest.raises(ConfigError, match=r"a trainer rank, by estimate, needs \d+.*use a larger parallel.tensor"):
        settled(whole)
    disaggregated = replace(NODE, ranks=4, world=4)
    with pytest.raises(ConfigError, match="a trainer rank, by estimate, needs"):
        settled(whole, disaggregated)
