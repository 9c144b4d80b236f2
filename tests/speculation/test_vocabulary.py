import json

import numpy as np
import pytest

from megatron_rlspec.speculation.vocabulary import DraftVocabulary


def test_the_most_frequent_words_and_the_ends_of_a_text_are_chosen():
    words = DraftVocabulary(4, 20, always=(19,))
    assert words.ids().tolist() == [0, 1, 2, 19]  # nothing was seen: the lowest ids
    words.observe([np.array([7, 7, 7, 5, 5]), np.array([9, 5, 12])])
    assert words.ids().tolist() == [5, 7, 9, 19]  # 9 and 12 alike: the lower id
    for _ in range(20):
        words.observe([np.array([12, 13])])
    assert words.ids().tolist() == [5, 12, 13, 19]  # what earlier rollouts held fades
    again = DraftVocabulary(4, 20, always=(19,))
    again.restore(json.loads(json.dumps(words.state())))
    assert np.array_equal(again.counts, words.counts)


@pytest.mark.parametrize(("size", "always"), [(0, ()), (20, ()), (1, (3, 4))])
def test_a_size_that_cannot_be_is_refused(size, always):
    with pytest.raises(ValueError, match=f"a draft vocabulary of {size} words: expected at least"):
        DraftVocabulary(size, 20, always)
