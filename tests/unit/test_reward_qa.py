import pytest

from megatron_arpo.reward.qa import best_f1, normalize, qa


def test_parts_by_hand():
    """Predicted {eiffel, tower}, golds {eiffel, tower, paris} with F1 = 0.8 and {big, ben} with 0."""
    reward = qa("<answer>the \\boxed{Eiffel Tower}</answer>", ["Eiffel Tower, Paris", "Big Ben"])
    assert reward.score == pytest.approx(0.8)
    assert reward.parts == {"em": 0.0, "f1": pytest.approx(0.8), "acc": 0.0}


@pytest.mark.parametrize(
    ("solution", "em", "acc"),
    [
        ("<think>Rome</think><answer>\\boxed{The Paris.}</answer>", 1, 1),  # the box
        ("<answer> paris </answer> Rome", 1, 1),  # no box: inside the tags
        ("<answer>\\boxed{Paris</answer>", 0, 1),  # a broken box is none
        ("It is Paris", 0, 1),  # no tags: all of it
        ("<answer>Rome</answer> Paris", 0, 0),
        ("", 0, 0),
    ],
)
def test_where_the_answer_is_read(solution, em, acc):
    parts = qa(solution, ["London", "Paris"]).parts
    assert (parts["em"], parts["acc"]) == (em, acc)


def test_yes_and_no_are_right_or_wrong_as_a_whole():
    assert best_f1("yes", ["yes it is"]) == 0.0
    assert best_f1("no it is not", ["no"]) == 0.0
    assert best_f1("Yes!", ["yes"]) == 1.0


def test_a_gold_of_articles_is_matched_by_nothing():
    assert qa("the", ["a"]).parts == {"em": 0.0, "f1": 0.0, "acc": 0.0}


def test_repeated_words_count_as_often_as_both_have_them():
    """{new, new, york} and {new, york, york}: 2 in common, P = R = 2/3."""
    assert best_f1("new new york", ["new york york"]) == pytest.approx(2 / 3)


def test_normalize():
    assert normalize("The  U.S.A.\n and an İ") == "usa and " + "İ".lower()


def test_golds_must_be_text():
    with pytest.raises(ValueError, match=r"answers\[0\]=5"):
        qa("5", [5])
