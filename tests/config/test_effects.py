"""Options without effect are refused: what each needs is declared beside it."""

import pytest

from megatron_rlspec.config import ConfigError, load


def test_an_option_is_refused_where_what_it_needs_is_off(tmp_path):
    with pytest.raises(ConfigError, match="^drafter.depth=2 has no effect while drafter.train=false$"):
        load(None, {"drafter.depth": "2", "drafter.train": "false"})
    (tmp_path / "c.toml").write_text("[drafter]\ndepth = 2\n")
    load(tmp_path / "c.toml", {"drafter.train": "false"})  # a command line switches off what a file sets up
