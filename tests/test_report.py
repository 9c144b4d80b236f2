import base64
import io
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from megatron_rlspec import metrics, report
from megatron_rlspec.metrics import pieces
from megatron_rlspec.types import Prompt, Sample

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PNG = re.compile(r'alt="([^"]+)" src="data:image/png;base64,([^"]+)"')
# Checks the page after layout, and writes the answers into it, where --dump-dom prints them.
PROBE = """<script>
window.wrong = []; addEventListener("error", event => wrong.push(String(event.message || event.target.src)), true);
addEventListener("load", () => { const answer = document.createElement("pre"); answer.id = "answer";
 answer.textContent = JSON.stringify({
  drawn: [...document.images].filter(i => i.complete && i.naturalWidth > 300 && i.clientWidth > 300).length,
  marks: [...document.querySelectorAll("mark")].map(m => [m.textContent, getComputedStyle(m).backgroundColor]),
  wide: document.documentElement.scrollWidth - innerWidth, wrong: wrong });
 document.body.append(answer); });</script>"""


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


def test_the_page_holds_plots_events_and_escaped_samples(run_dir, capsys):
    assert report.main([str(run_dir)]) == 0
    page = (run_dir / "report.html").read_text()
    titles = [title for title, _ in PNG.findall(page)]
    assert len(titles) == 11 and {"reward", "share of rounds per configuration", "seconds of a step"} <= set(titles)
    for _, image in PNG.findall(page):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB"))
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20  # axes, text and at least one line
    assert "engine-0: plain" in page and "&lt;b&gt;" in page and "<b>" not in page and "2.00" in page
    assert "<pre>a<mark>&lt;i&gt;c</mark>d</pre>" in page and "<pre>no spans</pre>" in page
    assert "http" not in page  # nothing is loaded from elsewhere


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
    stays = [["a", "engine-0", 0, 2.0], ["b", "engine-0", 0, 1.01], ["b", "engine-1", 1.02, 3]]
    rows = [{"step": 3, "stays": stays, "moves": [move], "decision_seconds": 0.01}]
    (run_dir / "moves.jsonl").write_text(json.dumps(rows[0]) + "\n")
    report.main([str(run_dir), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "engines of step 4 over time" in [title for title, _ in PNG.findall(page)]
    assert "<td>engine-0<td>engine-1<td>kv" in page and "<td>2<td>12<td>1.5<td>2 samples on engine-0</tr>" in page
    (run_dir / "moves.jsonl").write_text(json.dumps(rows[0] | {"stays": [["a", "engine-0", 0]]}) + "\n")
    with pytest.raises(metrics.RecordError, match="moves.jsonl:1: stays.0.3: Field required"):
        report.main([str(run_dir), "--out", str(tmp_path / "page.html")])
    (run_dir / "moves.jsonl").unlink()


def test_the_page_shows_compared_drafters(run_dir, tmp_path):
    row = {"steps": 3, "drafter": "own", "value": 2.5, "low": 2.4, "high": 2.6}
    pair = row | {"minus": "frozen", "value": 0.1, "low": 0.05, "high": 0.15, "shown": "above 0"}
    table = run_dir / "comparison.json"
    table.write_text(json.dumps({"accept_lengths": [row], "differences": [pair]}))
    try:
        report.main([str(run_dir), "--out", str(tmp_path / "page.html")])
        page = (tmp_path / "page.html").read_text()
        assert "<td>own - frozen<td>0.100 [0.050, 0.150]<td>above 0" in page
        table.write_text('{"accept_lengths": [{"steps": 3}], "differences": []}')
        with pytest.raises(metrics.RecordError, match="comparison.json: accept_lengths.0.drafter: Field required"):
            report.main([str(run_dir), "--out", str(tmp_path / "page.html")])
    finally:
        table.unlink()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_it(run_dir, tmp_path):
    """Every plot is drawn, accepted drafts are coloured, the browser reports no error, the screenshot is not blank."""
    report.main([str(run_dir)])
    page = run_dir / "report.html"
    page.write_text(PROBE + page.read_text())
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    browser += ["--window-size=1200,1900", "--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}"]
    shot = tmp_path / "report.png"
    drawn = subprocess.run(
        [*browser, f"--screenshot={shot}", page.as_uri()], capture_output=True, text=True, timeout=90
    )
    assert shot.exists(), drawn.stderr[-2000:]
    dumped = subprocess.run([*browser, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=90)
    answer = json.loads(
        re.search(r'<pre id="answer">(.*?)</pre>', dumped.stdout, re.S)[1].replace("&lt;", "<").replace("&gt;", ">")
    )
    assert answer["drawn"] == 11 and answer["wrong"] == [] and answer["wide"] <= 0
    assert answer["marks"] == [["Marked", "rgb(191, 227, 198)"], ["<i>c", "rgb(191, 227, 198)"]]
    pixels = np.asarray(Image.open(shot).convert("RGB"))
    assert pixels.shape == (1900, 1200, 3)
    assert (pixels.reshape(-1, 3) == (191, 227, 198)).all(1).sum() > 100  # the marks
    for row in range(0, 1300, 260):  # a band of plots each
        assert len(np.unique(pixels[row : row + 260].reshape(-1, 3), axis=0)) > 50


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


def test_a_drafter_that_learns_every_second_step_has_its_pictures():
    records = [{"step": i, "drafter/loss_1": 2.0 - i} if i % 2 == 0 else {"step": i} for i in range(4)]
    assert [title for title, _ in report.plots(records)] == ["drafter loss by depth"]
