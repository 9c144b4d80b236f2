import json

import pytest

from megatron_rlspec import report


def test_the_page_holds_plots_events_and_escaped_samples(tmp_path, capsys):
    record = {"step": 0, "rollout/reward": 0.5, "policy/loss": 1.0, "spec/share_k3": 1.0, "seconds_train": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record | {"step": 1}) + "\n")
    (tmp_path / "events.jsonl").write_text(json.dumps({"kind": "health", "message": "engine-0: plain"}) + "\n")
    row = {"step": 1, "prompt": "<b>", "response": "x", "label": "1", "reward": 1.0, "accepted": [0, 2]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    report.main([str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "engine-0: plain" in page and "&lt;b&gt;" in page and "<b>" not in page and "2.00" in page
    assert "http" not in page  # nothing is loaded from elsewhere


def test_a_directory_that_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        report.main([str(tmp_path)])
    assert stop.value.code == 2 and "expected a run directory" in capsys.readouterr().err
