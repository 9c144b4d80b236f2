"""A session is opened for a trainer that opens none, and only then. (test_slime_path has SGLang's real manager.)"""

from types import SimpleNamespace

from megatron_rlspec.rollout.sglang.scheduler.push_session import PushSession


class Manager:
    def __init__(self):
        self._session = None
        self.log = []

    def begin_weight_update(self, request):
        self._session = request
        self.log.append(request)

    def end_weight_update(self, request):
        self._session = None
        self.log.append(request)


def pushed(ours, manager, buckets):
    for bucket in range(buckets):
        ours.open(manager, bucket)
        assert manager._session is not None
        manager.log.append(bucket)
    ours.close(SimpleNamespace(weight_updater=manager), None)


def test_one_session_over_all_buckets_of_every_push():
    ours = PushSession("begin", "end")
    manager = Manager()
    pushed(ours, manager, 3)
    pushed(ours, manager, 1)
    assert manager.log == ["begin", 0, 1, 2, "end", "begin", 0, "end"]


def test_a_session_that_the_trainer_opened_is_not_touched():
    ours = PushSession("begin", "end")
    manager = Manager()
    manager._session = "his"
    pushed(ours, manager, 2)
    assert manager.log == [0, 1] and manager._session == "his"


def test_continuing_without_a_push_closes_no_session():
    ours = PushSession("begin", "end")
    manager = Manager()
    pushed(ours, manager, 0)
    assert manager.log == []
