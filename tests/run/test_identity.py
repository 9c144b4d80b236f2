"""Digests of what results depend on."""

import shutil

import numpy as np

from megatron_rlspec.run import identity
from megatron_rlspec.types import Prompt


def big(folder, header=b"h" * 900):
    """Write a weights file above `identity.WHOLE`."""
    folder.mkdir()
    size = identity.WHOLE + (1 << 20)
    content = len(header).to_bytes(8, "little") + header + np.random.default_rng(0).bytes(size)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    return folder


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_copy_is_the_same_and_changes_are_seen(tmp_path):
    model = big(tmp_path / "a")
    before = identity.of_model(model)
    assert identity.of_model(shutil.copytree(model, tmp_path / "b")) == before
    for place in (-1, 0, 8 + 899, 12):  # the last sample, and the header
        flip(tmp_path / "b/model.safetensors", place)
        assert identity.of_model(tmp_path / "b") != before
        flip(tmp_path / "b/model.safetensors", place)
    assert identity.of_model(tmp_path / "b") == before
    with (tmp_path / "b/model.safetensors").open("ab") as file:
        file.write(b"0")
    assert identity.of_model(tmp_path / "b") != before
    (model / "chat_template.jinja").write_text("x")
    assert identity.of_model(model) != before


def test_rows_are_their_contents_in_their_order():
    def rows(*tokens, **fields):
        return [Prompt(i, np.array([t]), **fields) for i, t in enumerate(tokens)]

    known = identity.of_rows(rows(1, 2))
    assert known == identity.of_rows(iter(rows(1, 2)))
    others = [
        rows(2, 1),
        rows(1, 2, 3),
        rows(1),
        rows(1, 2, label="x"),
        rows(1, 2, text="x"),
        rows(1, 2, metadata={"a": 1}),
    ]
    assert known not in [identity.of_rows(other) for other in others]
