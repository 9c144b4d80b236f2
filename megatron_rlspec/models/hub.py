"""Names of models on the Hugging Face Hub in place of directories."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_rlspec.models.config import CheckpointError
from megatron_rlspec.texts import first_line

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.py"]


def local(path: str) -> str:
    """Return `path`, or the directory of a model that it names on the Hub, which is downloaded if it is not there yet.

    `huggingface_hub` reads its variables, such as HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. Raises CheckpointError.
    """
    if Path(path).exists() or not _NAME.fullmatch(path):
        return path
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(path, allow_patterns=_FILES)
    except Exception as error:  # of the network, of the Hub, of the disk
        raise CheckpointError(
            f"{path}: no such directory, and no model of that name from the Hub ({first_line(error)})"
        ) from None
