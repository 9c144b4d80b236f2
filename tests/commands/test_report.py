"""`rlspec report`: what a page has, what it leaves out, and texts that stay texts."""

import json
from html.parser import HTMLParser

import pytest

from megatron_rlspec.commands import report
from megatron_rlspec.commands.report import charts

EVALUATION = {"kind": "evaluation", "message": "m", "samples": 4, "reward_std": 0.5}
# Texts that end a tag, an attribute, a script or a comment, or name a script to run.
HOSTILE = [
    "<script>window.hit=1</script>",
    "</pre></td><script>window.hit=1</script>",
    "--><script>window.hit=1</script>",
    '"><img src=x onerror=window.hit=1>',
    "'><img src=x onerror=window.hit=1>",
    "{{ 7 * 7 }}{% for x in y %}",
]


class Tags(HTMLParser):
    """Collects every tag of a page, and the attributes that could run a script or load something."""

    def __init__(self, page):
        super().__init__()
        self.tags = []
        self.live = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.live += [(tag, name) for name, _ in attributes if name.startswith("on") or name in ("src", "href")]


def write(folder, **rows):
    """Write JSON lines: `metrics=[{...}]` to metrics.jsonl. Returns the folder."""
    folder.mkdir(exist_ok=True)
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def run_dir(tmp_path):
    """The files of a run of twelve steps."""
    metrics = []
    for step in range(12):
        share = step / 12
        record = {"step": step, "time": 1.0 + step, "rollout/reward": 0.3 + 0.03 * step, "rollout/truncated": 0.25}
        record |= {"rollout/accept_length": 2 + share, "spec/share_k3": 1 - share, "spec/share_off": share}
        record |= {"drafter/loss_1": 2.0 / (1 + step), "drafter/loss_2": 3.0, "seconds_generate": 3.0 + share}
        metrics.append(record | {"policy/grad_norm": 1.0, "policy/loss": None})
    folder = write(
        tmp_path / "run", metrics=metrics, events=[EVALUATION | {"step": s, "reward": s / 10} for s in (0, 5)]
    )
    pieces = [["a", False], ["<i>c", True], ["d", False]]
    sample = {"step": 1, "prompt": "<b>", "response": "a<i>cd", "label": "1", "reward": None, "accepted": [0, 2]}
    write(folder, samples=[sample | {"pieces": pieces, "reward_error": "odd"}])
    started = {"time": 1.0, "step": 0, "command": "rlspec train", "ranks": 1, "versions": {}}
    write(folder, process=[started, {"kind": "end", "time": 2.0}])  # earlier versions wrote the second line
    (folder / "config.json").write_text(json.dumps({"train": {"steps": 12}}))
    return folder


def page_of(run_dir):
    out = run_dir / "page.html"
    assert report.main([str(run_dir), "--out", str(out)]) == 0
    return out.read_text()


def test_the_page_of_one_run(run_dir):
    page = page_of(run_dir)
    for title in ("Reward", "Accept length", "Which configuration ran when", "Drafter loss by depth"):
        assert f"<h3>{title}</h3>" in page
    assert "<b>0 → 0.5</b>" in page, "held-out reward"
    assert "<code>rollout/truncated</code> 0.25 (normal: below 0.1)" in page
    assert "<pre>a<mark>&lt;i&gt;c</mark>d</pre>" in page and 'title="odd">failed' in page
    assert "http:" not in page and "https:" not in page and page.count("url(") == page.count("url(#")


def test_short_labels_round_up_to_the_next_unit():
    labels = {999.9: "1000", 9999.4: "9999", 9999.5: "10k", 999_499: "999k", 999_999: "1M", 999_999_999: "1G"}
    assert {value: charts.short(value) for value in labels} == labels


def test_hostile_texts_stay_texts(tmp_path):
    """Each text stands in every place of a run's files: the page has the same tags as with harmless texts."""
    plain = Tags(page_with(tmp_path / "plain", [f"<harmless{i}>" for i in range(len(HOSTILE))]))
    hostile = Tags(page_with(tmp_path / "hostile", HOSTILE))
    assert len(plain.tags) > 100
    assert hostile.tags == plain.tags and not hostile.live


def page_with(folder, texts):
    """Return the page of a run whose files hold each of `texts` wherever text may stand."""
    metrics = [{"step": i, "rollout/reward": 0.5 * i} | {f"rollout/{text}": 1.0 for text in texts} for i in range(2)]
    samples = []
    for text in texts:
        sample = {"step": 1, "prompt": text, "response": text, "label": text, "reward": 1.0, "accepted": [0, 2]}
        samples.append(sample | {"pieces": [[text, True], [text, False]]})
    start = {"kind": "start", "time": 1.0, "step": 0, "ranks": 1, "command": " ".join(texts)}
    process = [start | {"versions": dict.fromkeys(texts, "1")}]
    write(folder, metrics=metrics, samples=samples, process=process)
    write(folder, events=[{"kind": text, "message": text} for text in texts])
    (folder / "config.json").write_text(json.dumps({text: {text: [text]} for text in texts}))
    return page_of(folder)


def test_a_directory_without_a_step_is_refused(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0')  # torn by a killed run
    with pytest.raises(SystemExit) as ended:
        report.main([str(tmp_path)])
    assert ended.value.code == 2 and "no metrics.jsonl with at least one step" in capsys.readouterr().err
