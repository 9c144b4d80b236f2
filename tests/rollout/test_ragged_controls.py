"""Engines with a mistake in their uneven rounds: the test of equal texts must find it."""

from __future__ import annotations

from pathlib import Path

import emulation
import pytest
import test_sglang_engine as same
import tiny_mimo

from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine

pytestmark = [pytest.mark.slow, pytest.mark.lossless]


@pytest.mark.parametrize("mistake", ["accepts_one_more", "accepts_unverified"])
def test_a_miscounted_request_is_found(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSPEC_API_KEY", "right-key")
    model = tiny_mimo.write(tmp_path / "mimo", same.CONFIG, same.WEIGHTS)
    environment = {emulation.VARIABLE: mistake}
    arguments = [*same.SERVE, *same.LAUNCHES["adaptive"]]
    with emulation.launch(model, tmp_path / "log", arguments, environment, "right-key") as process:
        engine = SGLangEngine.of(process.wait(), timeout=120)
        with pytest.raises(AssertionError, match=r"^(none|some|all)\b"):
            same.test_text_does_not_depend_on_which_drafts_are_verified({"adaptive": engine}, "T=1")  # type: ignore[arg-type]
