"""Keep generated tokens out of SGLang's prefix tree until the drafter has read them, too.

A later turn that matches a prefix in the tree reuses the caches of target and drafter. While speculation was off, the
drafter's cache did not get the generated tokens. Such a request is kept out of the tree
(`Req.skip_radix_cache_insert`) until its drafter has caught up. Its prompt is in the tree already, since the drafter
reads every prompt.

SGLang inserts tokens when it processes the results of a round, which may be one round after it launched the next one.
So the flag follows the results, not the launches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakSet

# SGLang's requests whose flag this module set, and not their sender
_ours: WeakSet[Any] = WeakSet()


def follow(requests: Sequence[Any], behind: Collection[int]) -> None:
    """Set the flag of SGLang's running requests for the results about to be processed.

    `behind`: indices of the requests whose drafter has not read the tokens that those results add.
    """
    if not behind and not _ours:
        return
    for i, request in enumerate(requests):
        if request.finished() or request.is_retracted:
            continue
        if i in behind:
            _keep_out(request)
        elif request in _ours:
            request.skip_radix_cache_insert = False
            _ours.remove(request)


def _keep_out(request: Any) -> None:
    if not request.skip_radix_cache_insert:
        request.skip_radix_cache_insert = True
        _ours.add(request)
