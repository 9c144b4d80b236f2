"""FP8 is off."""

import contextlib


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled():
        return False


def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    assert not enabled, "this stand-in has no FP8"
    return contextlib.nullcontext()
