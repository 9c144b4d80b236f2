"""What trainers and clients of other projects do to SGLang's own server, with the plugin in it, and one without it."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import plain_server
import pytest
import requests
import tiny_mimo
import torch
import torch.distributed as dist
import torch.multiprocessing
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.types import SpecConfig

pytestmark = pytest.mark.slow
CONFIG = tiny_mimo.config(hidden=64, layers=1, heads=2, kv_heads=1, ffn=128, vocab=100)
WEIGHTS = tiny_mimo.agreeing(tiny_mimo.weights(CONFIG), CONFIG["vocab_size"])  # the drafter is right
VOCABULARY = ["<pad>", "<bos>", "<eos>", *map(chr, range(32, 127)), "<a>", "<b>"]
PROMPT = [40, 41, 42]


def write_tokenizer(folder: Path) -> None:
    """One token a character."""
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(VOCABULARY)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(VOCABULARY[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))


class Server:
    def __init__(self, engine: SGLangEngine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder

    def post(self, path: str, body: dict[str, Any] | None = None, **options: Any) -> requests.Response:
        answer = requests.post(f"{self.engine.url}/{path}", json=body or {}, timeout=120, **options)
        assert answer.status_code == 200, f"{path}: {answer.text[:2000]}"
        return answer

    def generate(self, tokens: int = 24, **more: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": tokens, "temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}
        return self.post("generate", {"input_ids": PROMPT, "sampling_params": sampling | more}).json()

    def expect(self, weights: dict[str, torch.Tensor]) -> None:
        """Check that target and drafter have these weights, and that the engine generates."""
        assert self.engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in weights.items()}
        assert len(self.generate(4)["output_ids"]) == 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("plain")
    model = tiny_mimo.write(folder / "model", CONFIG, WEIGHTS)
    write_tokenizer(model)
    with plain_server.started(model, folder, "1", ["--grammar-backend=xgrammar"]) as engine:
        engine.set_config(SpecConfig(2))
        yield Server(engine, folder)


def scaled(factor: float) -> dict[str, torch.Tensor]:
    return {name: tensor * factor for name, tensor in WEIGHTS.items()}


SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"top_p": 0.8, "top_k": 20, "min_p": 0.02},
    "frequency": {"frequency_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.5},
    "least tokens": {"min_new_tokens": 12, "ignore_eos": False, "logit_bias": {"2": 3.0}},
    "logit bias": {"logit_bias": {"40": 4.0, "50": 4.0}},
    "stop": {"stop": ["a", "B"]},
}


def text_and_drafts(server: Server, **sampling: Any) -> tuple[list[list[int]], bool]:
    """Return the texts of four seeds, and whether a round had drafts."""
    server.engine.stats()
    texts = [server.generate(**sampling, sampling_seed=seed)["output_ids"] for seed in range(4)]
    return texts, any(not stats.config.off for stats in server.engine.stats())


def without_drafts(server: Server, texts: Callable[[], tuple[list[list[int]], Any]]) -> list[list[int]]:
    server.engine.hold("the text without drafts")
    try:
        return texts()[0]
    finally:
        server.engine.release()


@pytest.mark.lossless
@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_change_no_text(server: Server, name: str) -> None:
    drafts = name not in ("frequency", "repetition", "least tokens")  # penalties: none
    texts = partial(text_and_drafts, server, **SAMPLINGS[name])
    assert texts() == (without_drafts(server, texts), drafts)


def test_a_request_without_a_seed_is_sampled_by_its_id(server: Server) -> None:
    def text(rid: str) -> list[int]:
        return server.post("generate", body | {"rid": rid}).json()["output_ids"]

    sampling = {"max_new_tokens": 16, "temperature": 1.0, "frequency_penalty": 0.0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    first = text("a")
    assert text("a") == first != text("b")


def test_a_stream_is_the_text(server: Server) -> None:
    sampling = {"max_new_tokens": 24, "temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
    lines = [line for line in server.post("generate", body, stream=True).iter_lines() if line]
    assert lines[-1] == b"data: [DONE]" and len(lines) > 3
    last = json.loads(lines[-2].removeprefix(b"data: "))
    assert last["output_ids"] == server.generate()["output_ids"]


def test_the_routes_of_openai(server: Server) -> None:
    asked = {"model": "default", "max_tokens": 16, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    completion = server.post("v1/completions", asked | {"prompt": "Hello"}).json()["choices"][0]["text"]
    chat = asked | {"messages": [{"role": "user", "content": "Hello"}]}
    answer = server.post("v1/chat/completions", chat | {"logprobs": True}).json()["choices"][0]
    assert answer["message"]["content"] == completion
    assert len(answer["logprobs"]["content"]) == 16
    parts = []
    for line in server.post("v1/chat/completions", chat | {"stream": True}, stream=True).iter_lines():
        if line and line != b"data: [DONE]":
            parts += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
    assert "".join(parts) == completion


def test_weights_of_both_models_from_tensors(server: Server) -> None:
    """A pickle with shared memory, as trainers on the same machine send it; no pause, as verl's."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # other processes can open it by name
    try:
        for factor in (3.0, 1.0):
            weights = scaled(factor)  # their memory is shared until they are loaded
            pickled = io.BytesIO()
            ForkingPickler(pickled).dump(list(weights.items()))
            sent = [base64.b64encode(pickled.getvalue()).decode()]
            server.post("update_weights_from_tensor", {"serialized_named_tensors": sent, "flush_cache": True})
            server.expect(weights)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


def test_weights_of_both_models_from_disk(server: Server) -> None:
    for factor in (2.0, 1.0):
        folder = tiny_mimo.write(server.folder / f"scaled-{factor}", CONFIG, scaled(factor))
        write_tokenizer(folder)
        server.post("update_weights_from_disk", {"model_path": str(folder)})
        server.expect(scaled(factor))


def test_weights_of_both_models_through_a_group(server: Server) -> None:
    """The trainer pauses the engine, broadcasts tensor by tensor, and lets it go on."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        port = free_port(ENGINES)
        joined = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        joined |= {"group_name": "trainer", "backend": "gloo"}
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
        with ThreadPoolExecutor(1) as other:
            answer = other.submit(server.post, "init_weights_update_group", joined)
            prefixed = dist.PrefixStore("trainer", store)
            named: Any = {"group_name": "trainer", "timeout": timedelta(seconds=60)}
            group: Any = _new_process_group_helper(2, 0, [], dist.Backend("gloo"), prefixed, **named)[0]
            _world.pg_group_ranks[group] = {0: 0, 1: 1}
            answer.result()
            for factor in (2.0, 1.0):
                weights = scaled(factor)
                body: dict[str, Any] = {"names": list(weights), "group_name": "trainer"}
                body["dtypes"] = ["float32"] * len(weights)
                body["shapes"] = [list(tensor.shape) for tensor in weights.values()]
                server.post("pause_generation", {"mode": "abort"})
                answer = other.submit(server.post, "update_weights_from_distributed", body)
                for tensor in weights.values():
                    dist.broadcast(tensor, src=0, group=group)
                answer.result()
                server.post("continue_generation")
                server.expect(weights)
    finally:
        dist.destroy_process_group()


def test_memory_is_released_and_resumed(server: Server) -> None:
    before = server.generate()["output_ids"]
    server.post("release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    server.post("resume_memory_occupation", {"tags": ["weights"]})
    server.post("resume_memory_occupation", {"tags": ["kv_cache"]})
    assert server.generate()["output_ids"] == before


def running(server: Server, rid: str, tokens: int) -> tuple[threading.Thread, list[dict[str, Any]]]:
    """Start a request, and wait until it decodes."""
    answers: list[dict[str, Any]] = []
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}
    body = {"rid": rid, "input_ids": PROMPT, "sampling_params": sampling}
    server.engine.stats()
    thread = threading.Thread(target=lambda: answers.append(server.post("generate", body).json()))
    thread.start()
    while not server.engine.stats():
        time.sleep(0.01)
    return thread, answers


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_in_flight_changes_no_text(server: Server, mode: str) -> None:
    alone = server.generate(600)["output_ids"]
    thread, answers = running(server, f"paused-{mode}", 600)
    server.post("pause_generation", {"mode": mode})
    server.engine.stats()
    time.sleep(0.2)
    assert not server.engine.stats()
    server.post("continue_generation")
    thread.join()
    assert answers[0]["output_ids"] == alone


def test_an_abort_keeps_the_others(server: Server) -> None:
    alone = server.generate(600)["output_ids"]
    thread, answers = running(server, "kept", 600)
    other, aborted = running(server, "left", 1900)
    server.post("abort_request", {"rid": "left"})
    other.join()
    thread.join()
    assert aborted[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert answers[0]["output_ids"] == alone


SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.mark.lossless
def test_drafts_change_no_text_under_a_grammar(server: Server) -> None:
    texts = partial(text_and_drafts, server, json_schema=SCHEMA, ignore_eos=False)
    assert texts() == (without_drafts(server, texts), True)
