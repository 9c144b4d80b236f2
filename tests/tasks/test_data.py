"""Rows of both formats, chat templates, lengths, and the order of drawing."""

import json
import runpy
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rlspec.config import DataConfig, SftConfig, load
from megatron_rlspec.tasks.data import (
    DataError,
    Demonstrations,
    Order,
    Prompts,
    Reading,
    load_tokenizer,
    read_demonstrations,
    read_prompts,
)

MAKE_TASK = Path(__file__).parents[2] / "examples" / "quickstart" / "make_task.py"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role[0] }}={{ m.content }},{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Make a tokenizer with one token per character, for a-z, A-V, digits, `=`, `,` and `#`."""
    path = tmp_path_factory.mktemp("tokenizer")
    runpy.run_path(str(MAKE_TASK))["write_tokenizer"](path)
    return path


@pytest.fixture
def tokenizer(directory):
    return load_tokenizer(directory)


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_jsonl_and_parquet_give_the_same_rows(tmp_path, tokenizer):
    rows = [
        {"prompt": f"a{i}b2=", "label": str(i + 2), "metadata": {"items": 2, "nested": {"x": [i]}}} for i in range(5)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=2)
    jsonl(tmp_path / "rows.jsonl", [rows[0], "", *rows[1:]])
    results = [read_prompts(tmp_path / name, DataConfig(), tokenizer, 100) for name in ("rows.jsonl", "rows.parquet")]
    for prompts, dropped in results:
        assert dropped == 0
        assert [(p.id, p.text, p.label, p.metadata) for p in prompts] == [
            (i, row["prompt"], row["label"], row["metadata"]) for i, row in enumerate(rows)
        ]
        for prompt in prompts:
            assert prompt.tokens.dtype == np.int64
            assert tokenizer.decode(prompt.tokens) == prompt.text


def test_labels_are_text_whatever_wrote_them(tmp_path, tokenizer):
    labels = [7, 2.5, 42.0, True, ["9"], ["a", "b"], [1.0, 2], {"target": 24}, 1e22]
    path = jsonl(tmp_path / "rows.jsonl", [{"q": "a1=", "gold": label, "extra": {"k": 1}} for label in labels])
    options = DataConfig(prompt_key="q", label_key="gold", metadata_key="extra")
    prompts, _ = read_prompts(path, options, tokenizer, 100)
    texts = ["7", "2.5", "42", "true", "9", '["a", "b"]', "[1, 2]", '{"target": 24}', "1" + "0" * 22]
    assert [p.label for p in prompts] == texts and prompts[0].metadata == {"k": 1}
    prompts, _ = read_prompts(path, DataConfig(prompt_key="q", label_key=""), tokenizer, 100)
    assert {p.label for p in prompts} == {""}


def test_chat_template_renders_messages_and_text(tmp_path, chat_tokenizer):
    messages = [{"role": "system", "content": "x1"}, {"role": "user", "content": "a1"}]
    rows = [{"prompt": messages, "label": "1"}, {"prompt": "b2", "label": "2"}]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    prompts, _ = read_prompts(path, DataConfig(apply_chat_template=True), chat_tokenizer, 100)
    assert [p.text for p in prompts] == ["s=x1,u=a1,a=", "u=b2,a="]
    table = pyarrow.Table.from_pylist(rows[:1])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    again, _ = read_prompts(tmp_path / "rows.parquet", DataConfig(apply_chat_template=True), chat_tokenizer, 100)
    assert again[0].text == prompts[0].text


VERL = {"data_source": "x", "prompt": [{"role": "user", "content": "a1"}], "reward_model": {"ground_truth": "7"}}
FORMS = {
    "verl": VERL | {"extra_info": {"index": 3}},
    "slime": {"prompt": VERL["prompt"], "label": "7", "metadata": {"index": 3}},
    "TRL": {"prompt": VERL["prompt"], "solution": "7", "metadata": {"index": 3}},
    "GSM8K": {"question": "a1", "answer": 7, "metadata": {"index": 3}},
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_other_projects_are_read_as_they_are(tmp_path, chat_tokenizer, form):
    path = jsonl(tmp_path / "rows.jsonl", [FORMS[form]])
    (prompt,), _ = read_prompts(path, DataConfig(apply_chat_template=True), chat_tokenizer, 100)
    assert (prompt.text, prompt.label, prompt.metadata) == ("u=a1,a=", "7", {"index": 3})


def test_several_files_of_every_kind(tmp_path, tokenizer):
    for name in ("b", "c"):
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name, "label": name}])
    jsonl(tmp_path / "d.json", [{"prompt": "d", "label": "d"}])
    (tmp_path / "e.json").write_text('\ufeff [\n {"prompt": "e", "label": "e"}]')
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "label": "a"}]), tmp_path / "a.parquet")
    config = load(None, {"data.path": f"{tmp_path}/a.parquet,{tmp_path}/*.json*", "model.max_length": "2000"})
    assert DataConfig(path=["x", "y"]).path == "x,y"
    prompts, _ = read_prompts(config.data.path, config.data, tokenizer, 100)
    assert [p.id for p in prompts] == list(range(5))
    assert [p.text for p in prompts] == [p.label for p in prompts] == list("abcde")
    for path, expected in (("/z*.jsonl", "no file has such a name"), ("", "a directory; expected files, such as")):
        with pytest.raises(DataError, match=expected):
            read_prompts(f"{tmp_path}{path}", config.data, tokenizer, 100)


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": None}}}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": None}}]
KEYS = (
    "{{ x }}{% for t in tools or [] %}t={{ t.function | length }},{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}={% if 'tool_calls' in m %}"
    "c{{ m.tool_calls[0].function.arguments | length }}{{ m.content }}{% else %}"
    "{{ m.content + 'e' }}{% endif %},{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)


def test_templates_see_messages_as_they_were_written(tmp_path, tokenizer):
    tokenizer.chat_template = KEYS
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a1"}, {"type": "text", "text": "b"}],
            "tool_calls": None,
        },
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "user", "content": "c", "tool_calls": []},
    ]
    rows = [{"prompt": messages, "label": "1", "tools": tools} for tools in (TOOLS, json.dumps(TOOLS), None)]
    options = DataConfig(apply_chat_template=True, chat_template_kwargs={"x": "V"})
    prompts, _ = read_prompts(jsonl(tmp_path / "rows.jsonl", rows), options, tokenizer, 100)
    text = "u=abe,a=c1,u=ce,a=".replace("ab", "a1b")
    assert [p.text for p in prompts] == [f"Vt=1,{text}", f"Vt=1,{text}", f"V{text}"]
    image = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
    with pytest.raises(DataError, match=r"rows.jsonl:1: prompt\[0\].content"):
        read_prompts(jsonl(tmp_path / "rows.jsonl", [{"prompt": image, "label": "1"}]), options, tokenizer, 100)


def test_a_last_turn_of_the_assistant_goes_on(tmp_path, chat_tokenizer):
    messages = [{"role": "user", "content": "a1"}, {"role": "assistant", "content": "b2"}]
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": messages, "label": "1"}])
    (prompt,), _ = read_prompts(path, DataConfig(apply_chat_template=True), chat_tokenizer, 100)
    assert prompt.text == "u=a1,a=b2"


def test_a_conversation_is_prompt_and_response(tmp_path, chat_tokenizer):
    messages = [{"role": "user", "content": "a1"}, {"role": "assistant", "content": "b2"}]
    rows = [{"messages": messages}, {"prompt": messages[:1], "completion": messages[1:]}]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    samples, _ = read_demonstrations(path, DataConfig(apply_chat_template=True), chat_tokenizer, 100)
    assert [chat_tokenizer.decode(sample.tokens) for sample in samples] == ["u=a1,a=b2<eos>"] * 2


@pytest.mark.parametrize("adds", [True, False])
def test_a_beginning_of_a_text_comes_once(tmp_path, directory, adds):
    tokenizer = load_tokenizer(directory)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.bos_token_id
    if adds:
        kind = tokenizers.processors.TemplateProcessing
        tokenizer.backend_tokenizer.post_processor = kind(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": text, "label": "1", "response": "b"} for text in ("a1", "<s>a1")])
    for options in (DataConfig(), DataConfig(apply_chat_template=True)):
        first, second = read_prompts(path, options, tokenizer, 100)[0]
        assert first.tokens.tolist().count(begin) == int(adds) and second.tokens.tolist().count(begin) == 1
        sample = read_demonstrations(path, options, tokenizer, 100)[0][0]
        assert sample.tokens.tolist() == [
            *first.tokens,
            *tokenizer("b", add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]


def test_demonstrations_train_the_response_and_its_end(tmp_path, tokenizer):
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a1=", "response": "a1=1,#1"}, {"prompt": "b2=", "response": ""}])
    samples, dropped = read_demonstrations(path, DataConfig(), tokenizer, 100)
    assert dropped == 0
    first, second = samples
    assert tokenizer.decode(first.tokens) == "a1=a1=1,#1<eos>"
    assert first.loss_mask.tolist() == [0] * 3 + [1] * 8
    assert first.prompt_len == 3 and first.text == "a1=1,#1" and not first.behaviour_logprobs.any()
    assert second.loss_mask.tolist() == [0, 0, 0, 1] and second.tokens[-1] == tokenizer.eos_token_id
    # 11 and 4 tokens: the end counts, too.
    assert [len(read_demonstrations(path, DataConfig(), tokenizer, n)[0]) for n in (11, 10)] == [2, 1]


@pytest.mark.parametrize("puts", ["first", "never"])
def test_a_response_has_no_space_that_its_text_lacks(tmp_path, puts):
    """SentencePiece puts a space before a text. A rollout's response follows a prompt, and has none."""
    plain = tokenizers.Tokenizer(tokenizers.models.BPE())
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=puts)
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["</s>"])
    plain.train_from_iterator(["the answer, the answer: a \n"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "the:\n", "response": text} for text in ("the", " the", "")])
    for sample in read_demonstrations(path, DataConfig(), tokenizer, 100)[0]:
        whole = tokenizer(f"the:\n{sample.text}")["input_ids"]
        assert sample.tokens.tolist() == [*whole, tokenizer.eos_token_id]


def test_sources_leave_out_what_is_too_long_and_draw_the_rest(tmp_path, tokenizer):
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a" * n, "label": "1", "written": "b" * 8} for n in range(1, 21)])
    assert load(None, {"model.max_length": "24", "rollout.max_new_tokens": "10"}).longest_prompt == 14
    prompts = Prompts(path, Reading(DataConfig(), tokenizer, 12, 0), taken=32)
    assert len(prompts) == 12
    assert prompts.summary == (
        f"{path}: 12 prompts; 8 others are left out, of more than 12 tokens; a step takes 32, so prompts come more "
        "than once in it"
    )
    held_out = Prompts(path, Reading(DataConfig(), tokenizer, 12, 0))
    assert held_out.summary == f"{path}: 12 prompts; 8 others are left out, of more than 12 tokens"
    options = SftConfig(response_key="written", held_out=0)
    demonstrations = Demonstrations(path, Reading(DataConfig(), tokenizer, 24, 0), options)
    assert len(demonstrations) == 24 - 8 - 1
    assert demonstrations.summary == f"{path}: 15 samples; 5 others are left out, of more than 24 tokens"
    drawn = prompts.take(12)
    assert sorted(len(p.tokens) for p in drawn) == list(range(1, 13))
    assert [len(p.tokens) for p in drawn] != list(range(1, 13))
    unshuffled = Prompts(path, Reading(DataConfig(shuffle=False), tokenizer, 12, 0))
    assert [len(p.tokens) for p in unshuffled.take(14)] == [*range(1, 13), 1, 2]


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_draws_every_row_once(shuffle):
    order = Order(10, seed=3, shuffle=shuffle)
    epochs = [order.take(10) for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(10))
    assert (epochs[0] != epochs[1]) == shuffle
    assert Order(10, seed=3, shuffle=shuffle).take(30) == sum(epochs, [])
    assert (Order(10, seed=4, shuffle=shuffle).take(30) == sum(epochs, [])) == (not shuffle)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("size", "count"), [(7, 3), (7, 6), (3, 7)])
def test_no_step_has_a_row_twice_unless_it_must(size, count, shuffle):
    order = Order(size, seed=1, shuffle=shuffle)
    steps = [order.take(count) for _ in range(4 * size)]
    for step in steps:
        often = [step.count(row) for row in range(size)]
        assert max(often) - min(often) <= 1 and len(step) == count
    drawn = sum(steps, [])
    often = [drawn.count(row) for row in range(size)]
    assert sum(often) == 4 * size * count and max(often) - min(often) <= 2  # nothing is lost: late rows come soon


def test_a_refilled_step_takes_no_row_that_it_has():
    order = Order(5, seed=3)
    for _ in range(30):
        step = order.take(3)
        step += order.take(1, beside=step)
        step += order.take(1, beside=step)
        assert sorted(step) == list(range(5))


def test_an_order_resumes_after_any_step():
    order = Order(7, seed=1)
    whole = [order.take(3) for _ in range(20)]
    for cut in range(20):
        first = Order(7, seed=1)
        before = [first.take(3) for _ in range(cut)]
        state = json.loads(json.dumps(first.state()))
        second = Order(7, seed=1)
        second.restore(state)
        assert before + [second.take(3) for _ in range(20 - cut)] == whole


def test_a_chat_template_that_refuses_is_reported_with_file_and_line(tmp_path, chat_tokenizer):
    path = jsonl(tmp_path / "rows.jsonl", [{"label": "1", "prompt": [{"role": "tool", "content": "x"}]}])
    with pytest.raises(DataError) as told:
        read_prompts(path, DataConfig(apply_chat_template=True), chat_tokenizer, 100)
    assert str(told.value) == f"{path}:1: the chat template refuses the messages: no tools here"


def test_a_bad_response_is_reported(tmp_path, tokenizer):
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a1=", "response": 5}])
    with pytest.raises(DataError, match=f"{path}:1: response: expected a valid string"):
        read_demonstrations(path, DataConfig(), tokenizer, 100)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        read_demonstrations(path, DataConfig(), tokenizer, 100)
