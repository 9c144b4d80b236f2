import asyncio
import json
from html.parser import HTMLParser

import chromium
import numpy as np
import pytest
from PIL import Image

from megatron_rlspec.commands import report
from megatron_rlspec.commands.report import charts, figures
from megatron_rlspec.commands.report.records import EventRow, read_run
from megatron_rlspec.records import recorder
from megatron_rlspec.records.recorder import pieces
from megatron_rlspec.types import Prompt, Sample

CHARTS = ["Reward", "Accept length", "Which configuration ran when", "Where a step's time goes"]
CHARTS += ["Drafter loss by depth", "Drafter agreement by depth", "Loss of the policy", "Gradient norms"]
CHARTS += ["Drafter's objective", "Response length", "Rollout speed"]
needs_browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here")
# Texts that end a tag, an attribute, a script or a comment, or name a script to run.
HOSTILE = [
    "<script>window.hit=1</script>",
    "</pre></td><script>window.hit=1</script>",
    "--><script>window.hit=1</script>",
    '"><img src=x onerror=window.hit=1>',
    "'><img src=x onerror=window.hit=1>",
    "{{ 7 * 7 }}{% for x in y %}",
    "${window.hit=1}`+window.hit+`",
    "\u2028window.hit=1//\u2029 &lt;script&gt; &#60;script&#62; \\u003cscript\\u003e",
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


@pytest.fixture
def run_dir(tmp_path):
    """Write the records of a run of twelve steps with `Recorder`."""
    draw = np.random.default_rng(0)
    lines = []
    for step in range(12):
        share = step / 12
        record = {"step": step, "rollout/reward": 0.3 + 0.03 * step, "rollout/accept_length": 2 + share}
        record |= {"spec/share_k3": 1 - share, "spec/share_off": share, "rollout/tokens_per_second": 900.0 + 50 * step}
        record |= {f"drafter/loss_{d}": 2.0 / (1 + step) + d for d in (1, 2, 3)} | {"drafter/objective": 5 - share}
        record |= {f"drafter/match_{d}": 0.5 + share / 3 for d in (1, 2, 3)}
        record |= {"seconds_generate": 3.0, "seconds_train": 1 + draw.random(), "seconds_push": 0.2}
        record |= {"rollout/median_response": 40, "rollout/p90_response": 70, "rollout/longest_response": 96}
        record |= {"policy/loss": draw.normal(), "policy/grad_norm": 1.0, "drafter/grad_norm": 2.0}
        lines.append(json.dumps(record))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "events.jsonl").write_text(json.dumps({"kind": "health", "message": "engine-0: plain"}) + "\n")
    row = {"step": 1, "prompt": "<b>", "response": "a<i>cd", "label": "1", "reward": 1.0, "accepted": [0, 2]}
    old = row | {"response": "no spans"}
    rows = [old, row | {"pieces": [["a", False], ["<i>c", True], ["d", False]]}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.json").write_text(json.dumps({"train": {"steps": 12}}))
    return tmp_path


def page_of(*run_dirs, out):
    report.main([*map(str, run_dirs), "--out", str(out)])
    return out.read_text()


def test_the_page_holds_plots_events_and_escaped_samples(run_dir, capsys):
    assert report.main([str(run_dir)]) == 0
    page = (run_dir / "report.html").read_text()
    assert [title for title in CHARTS if f"<h3>{title.replace(chr(39), '&#39;')}</h3>" not in page] == []
    assert "engine-0: plain" in page and "&lt;b&gt;" in page and "<b>" not in page.split("</style>")[1].split("tile")[0]
    assert "<pre>a<mark>&lt;i&gt;c</mark>d</pre>" in page and "<pre>no spans</pre>" in page
    assert "http:" not in page and "https:" not in page and page.count("url(") == page.count("url(#")


def test_one_configuration_is_named_as_several_are(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "spec/share_k3": 1.0}\n{"step": 1, "spec/share_k3": 1.0}\n')
    assert ">k3</text>" in page_of(tmp_path, out=tmp_path / "page.html")


def test_the_head_says_how_the_run_was_made(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/bin/rlspec", "train", "--optimizer.lr", "1e-5", "--data.path", "a b"])
    records = recorder.Recorder(run_dir, 12)
    records.started(12)
    records.close()
    page = page_of(run_dir, out=tmp_path / "page.html")
    assert "rlspec train --optimizer.lr 1e-5 --data.path &#39;a b&#39;" in page and "python 3." in page
    assert '<td class="wrap"><code>train.steps</code></td><td class="wrap">12</td><td class="wrap">100</td>' in page
    assert "megatron_rlspec" not in page.split("<body>")[1].split('class="facts"')[0]
    (run_dir / "process.jsonl").unlink()


def test_the_head_says_whether_it_learnt_and_what_is_unusual(run_dir, tmp_path):
    events = [{"kind": "evaluation", "message": n, "name": n, "reward": r} for n, r in (("first", 0.1), ("last", 0.4))]
    record = {"rollout/reward": 0.4, "rollout/truncated": 0.25, "rollout/failed_rewards": 0}
    folder = tmp_path / "learnt"
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record | {"step": i}) + "\n" for i in range(3)))
    page = page_of(folder, out=tmp_path / "page.html")
    head = page.split("<body>")[1].split('class="facts"')[0]
    assert "<b>0.1 → 0.4</b>" in head and "<h1>" + "/".join(folder.parts[-2:]) in head
    assert "<code>rollout/truncated</code> 0.25 (normal: below 0.1): raise rollout.max_new_tokens" in head
    assert "failed_rewards" not in head
    assert "Outside their normal values" not in page_of(run_dir, out=tmp_path / "page.html")


def test_hostile_texts_stay_texts(tmp_path):
    """Each text stands in every place of a run's files: the page has the same tags as with harmless texts."""
    plain = Tags(hostile_run(tmp_path, [f"<harmless{i}>" for i in range(len(HOSTILE))]))
    found = Tags(hostile_run(tmp_path, HOSTILE))
    assert len(plain.tags) > 100
    assert found.tags == plain.tags and not found.live


def test_an_evaluation_is_drawn_once_at_the_steps_that_the_policy_had():
    """A run that ended after 100 steps went on to 200, and a resumed run evaluated step 40 again."""
    made = [("first", None, 0.1), ("step-000040", None, 0.2), ("step-000040", 40, 0.3), ("last", 100, 0.4)]
    made += [("last", 200, 0.5)]
    events = [
        EventRow(kind="evaluation", message=name, name=name, reward=reward, **({"step": step} if step else {}))
        for name, step, reward in made
    ]
    found = figures.evaluations([{"step": 199}], events, "reward")
    assert [(mark.x, mark.value) for mark in found] == [(0, 0.1), (40, 0.3), (100, 0.4), (200, 0.5)]


def hostile_run(tmp_path, texts):
    """Return the page of a run whose files hold each of `texts` wherever text may stand."""
    folder = tmp_path / "hostile"
    folder.mkdir(exist_ok=True)
    record = {f"spec/share_{text}": 0.5 for text in texts} | {f"rollout/{text}": 1.0 for text in texts}
    files = {name: [] for name in ("events.jsonl", "samples.jsonl", "moves.jsonl")}
    files["metrics.jsonl"] = [record | {"step": i, "rollout/reward": 0.5} for i in range(2)]
    differences = []
    moves = {"step": 1, "moves": []}
    for text in texts:
        move = {"source": text, "target": f"{text}2", "ids": [text], "how": text, "why": text, "began": 0.5}
        moves["moves"].append(move | {"ms": 1.0, "bytes": 1, "rounds": 1.0, "refused": text})
        sample = {"step": 1, "prompt": text, "response": text, "label": text, "reward": 1.0, "accepted": [0, 2]}
        files["samples.jsonl"] += [sample | {"pieces": [[text, True], [text, False]]}]
        files["events.jsonl"] += [{"kind": text, "message": text}]
        differences.append(
            {"steps": 3, "drafter": text, "minus": text, "value": 0.1, "low": 0, "high": 0.2, "shown": text}
        )
    files["moves.jsonl"] = [moves]
    command = " ".join(texts)
    process = {"kind": "start", "time": 1.0, "step": 0, "command": command, "versions": dict.fromkeys(texts, command)}
    files["process.jsonl"] = [process]
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"train": {"run_dir": texts[0]}} | {text: {text: [text]} for text in texts}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "comparison.json").write_text(json.dumps({"accept_lengths": [], "differences": differences}))
    return page_of(folder, out=tmp_path / "hostile.html")


def test_the_page_shows_moves_between_engines(run_dir, tmp_path):
    move = {
        "source": "engine-0",
        "target": "engine-1",
        "ids": ["b"],
        "how": "kv",
        "why": "2 samples on engine-0",
        "began": 1,
    }
    move |= {"ms": 12.4, "bytes": 2000, "rounds": 1.5, "refused": "", "kept": 1, "away_ms": 3.0}
    rows = [{"step": 3, "moves": [move], "decision_seconds": 0.01}]
    rows[0]["sizes"] = [{"from": 1, "to": 2, "samples": 5, "ms": 33.3, "began": 1.5}]
    rows.append({"step": 4, "moves": []})
    (run_dir / "moves.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report.main([str(run_dir), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "<td>engine-0</td><td>engine-1</td><td>kv</td><td>2</td><td>12</td><td>1.5</td>" in page
    assert "<td>4</td><td>1</td><td>2</td><td>5</td>" in page
    (run_dir / "moves.jsonl").write_text(json.dumps(rows[0] | {"moves": [move | {"ms": "x"}]}) + "\n")
    with pytest.raises(recorder.RecordError, match=r"moves.jsonl:1: moves\[0\].ms: expected a valid number"):
        report.main([str(run_dir), "--out", str(tmp_path / "page.html")])
    (run_dir / "moves.jsonl").unlink()


def test_the_page_shows_compared_drafters(run_dir, tmp_path):
    row = {"steps": 3, "drafter": "own", "value": 2.5, "low": 2.4, "high": 2.6}
    pair = row | {"minus": "frozen", "value": 0.1, "low": 0.05, "high": 0.15, "shown": "above 0"}
    table = run_dir / "comparison.json"
    others = pair | {"drafter": "control"}
    table.write_text(json.dumps({"accept_lengths": [row], "differences": [pair, others]}))
    try:
        report.main([str(run_dir), "--out", str(tmp_path / "page.html")])
        page = (tmp_path / "page.html").read_text()
        assert "<td>own - frozen</td><td>0.100 [0.050, 0.150]</td><td>above 0</td>" in page
        assert "control - frozen" not in page
        table.write_text('{"accept_lengths": [{"steps": 3}], "differences": []}')
        with pytest.raises(recorder.RecordError, match=r"comparison.json: accept_lengths\[0\].drafter: Field required"):
            report.main([str(run_dir), "--out", str(tmp_path / "page.html")])
    finally:
        table.unlink()


def test_runs_are_compared(run_dir, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text(json.dumps({"step": 0, "rollout/reward": 0.25}) + "\n")
    (other / "config.json").write_text(json.dumps({"train": {"steps": 7}}))
    page = page_of(run_dir, other, out=tmp_path / "page.html")
    assert "Options that differ between the runs" in page and '<td class="wrap">7</td>' in page
    assert 'title="rollout/reward: ' in page and page.count("<h3>Reward</h3>") == 1 and "0.25" in page
    assert [drawing.series[0].label for drawing in figures.of_runs([read_run(other)])] == ["other"]
    assert "do not compare" not in page
    (other / "config.json").write_text(json.dumps({"rollout": {"engine": "embedded"}}))
    page = page_of(run_dir, other, out=tmp_path / "page.html")
    assert "<b>rollout.engine differs: do not compare tokens/s and accept length of these runs.</b>" in page


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it(run_dir, tmp_path, scheme):
    asyncio.run(look(run_dir, tmp_path, scheme))


async def look(run_dir, tmp_path, scheme):
    """Charts have axes and are as wide as the page allows; filter and print work; the console is silent."""
    page = tmp_path / "page.html"
    page_of(run_dir, out=page)
    async with chromium.tab(tmp_path / "profile") as tab:
        await tab.load(page, 1280, scheme)
        drawn = await tab.evaluate("""[...document.querySelectorAll("figure")].map(f => [
            f.querySelector("h3").textContent, f.querySelector("svg").clientWidth,
            f.querySelectorAll("g[id^=xtick]").length, f.querySelectorAll("g[id^=ytick]").length,
            f.querySelectorAll("svg path").length])""")
        ink = await tab.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
        assert ink == {"light": "rgb(28, 33, 40)", "dark": "rgb(227, 231, 236)"}[scheme]
        assert {title for title, *_ in drawn} >= set(CHARTS)
        assert all(wide > 300 and x > 1 and y > 1 and shapes > 0 for _, wide, x, y, shapes in drawn), drawn
        back = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 21, 26)"}[scheme]
        marks = await tab.evaluate("[...document.querySelectorAll('mark')].map(m => m.textContent)")
        assert marks == ["Marked", "<i>c"]
        shot = tmp_path / "page.png"
        await tab.screenshot(shot)
        pixels = np.asarray(Image.open(shot).convert("RGB"))
        for row in range(0, 1600, 400):  # a band of plots each
            assert len(np.unique(pixels[row : row + 400].reshape(-1, 3), axis=0)) > 50
        await tab.evaluate("least.value = '1.5', least.dispatchEvent(new Event('input'))")
        assert await tab.evaluate("shown.textContent") == "0 of 2 shown"
        await tab.load(page, 400, scheme)
        assert await tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        await tab.load(page, 720, scheme, "print")
        printed = "[getComputedStyle(document.body).backgroundColor, document.documentElement.scrollWidth - innerWidth]"
        back, wide = await tab.evaluate(printed)
        assert back == "rgb(255, 255, 255)" and wide <= 0
        assert await tab.evaluate("getComputedStyle(document.querySelector('.filter')).display") == "none"
        assert not tab.errors


@needs_browser
@pytest.mark.slow
def test_no_hostile_text_runs_in_a_browser(tmp_path):
    async def visit():
        async with chromium.tab(tmp_path / "profile") as tab:
            hostile_run(tmp_path, HOSTILE)
            await tab.load(tmp_path / "hostile.html")
            assert await tab.evaluate("window.hit === undefined && document.scripts.length === 1")
            assert await tab.evaluate("document.querySelectorAll('table.samples pre').length") == 2 * len(HOSTILE)
            assert not tab.errors

    asyncio.run(visit())


def test_a_response_is_split_at_accepted_drafts():
    text = "añ b"  # the second character is two tokens
    tokens = np.array([7, *text.encode()])
    sample = Sample("s", Prompt(0, tokens[:1]), tokens, np.ones(6), np.zeros(6), accepted_spans=((0, 1), (2, 4)))
    found = pieces(sample, lambda ids: bytes(int(i) for i in ids).decode(errors="replace"))
    assert found == [("a", True), ("ñ ", True), ("b", False)] and "".join(piece for piece, _ in found) == text


def test_a_directory_that_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        report.main([str(tmp_path)])
    assert stop.value.code == 2 and "expected a run directory" in capsys.readouterr().err


def test_a_drafter_that_learns_every_second_step_has_its_charts(tmp_path):
    records = [{"step": i, "drafter/loss_1": 2.0 - i} if i % 2 == 0 else {"step": i} for i in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (drawing,) = figures.of_run(read_run(tmp_path))
    assert drawing.title == "Drafter loss by depth" and drawing.series[0].points == [(1.0, 2.0), (3.0, 0.0)]


def test_a_line_is_a_mean_with_its_interval():
    draw = np.random.default_rng(3)
    points = [(float(x), y) for x, y in enumerate(draw.normal(5.0, 1.0, 400))]
    means = charts.smooth(points)
    inside = [low <= 5.0 <= high for _, _, low, high in means]
    assert charts.smooth(points[:15]) is None and 0.9 < np.mean(inside) <= 1.0
    assert charts.interval([1.0, 2.0, 3.0, 4.0]) == pytest.approx(
        (2.5, 3.182 * np.std([1, 2, 3, 4], ddof=1) / 2), rel=1e-3
    )
    assert len(charts.thin([(float(x), 1.0) for x in range(5000)])) <= charts.MOST_POINTS


def test_the_prediction_of_a_step_is_drawn_at_the_next_one(tmp_path):
    rows = [
        {"step": i, "spec/accept_1": 0.5, "spec/accept_2": 0.5, "predict/next_tokens_k1": 1.25 + 0.25 * i}
        for i in range(3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (drawing,) = [d for d in figures.of_run(read_run(tmp_path)) if d.title == "Accept length by depth"]
    assert {one.label: one.points for one in drawing.series} == {
        "1 draft": [(1, 1.5), (2, 1.5), (3, 1.5)],
        "1 draft, predicted": [(2, 1.25), (3, 1.5)],
        "2 drafts": [(1, 1.75), (2, 1.75), (3, 1.75)],
    }
