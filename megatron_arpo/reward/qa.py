"""Word overlap with gold answers: exact match, F1 and containment, and the `qa` reward made of them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from megatron_arpo.reward.base import gold_answers
from megatron_arpo.reward.format import answer_text, last_boxed
from megatron_arpo.types import LeafReward

_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
"""Answers that are right or wrong as a whole: sharing a word with a longer answer earns nothing."""

_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def qa(solution: str, answers: Sequence[str]) -> LeafReward:
    r"""Score: F1 of the answer against the best gold. Parts, each the best over the golds: em, f1, acc (contains it).

    The answer is the last box inside the answer tags; without a box all that stands between them; without tags the
    whole solution. The format earns and costs nothing. Words are separated by white space, so text in a script without
    spaces is one word. Golds of articles and punctuation alone are matched by nothing.

    Example: qa("<answer>\\boxed{Eiffel Tower}</answer>", ["Eiffel Tower, Paris"]) scores 2 * 1 * 2/3 / (1 + 2/3) = 0.8.
    """
    golds = gold_answers(answers)
    prediction = _predicted(solution)
    words = normalize(prediction)
    normalized_golds = [gold for gold in map(normalize, golds) if gold]
    score = best_f1(prediction, golds)
    em = float(words in normalized_golds)
    acc = float(any(gold in words for gold in normalized_golds))
    return LeafReward(score=score, reason=f"answer {prediction!r}", parts={"em": em, "f1": score, "acc": acc})


def _predicted(solution: str) -> str:
    inside = answer_text(solution)
    if inside is None:
        return solution
    boxed, _ = last_boxed(inside)
    return inside if boxed is None else boxed


def normalize(text: str) -> str:
    """Lower case without ASCII punctuation, English articles and extra white space, as in SQuAD and the published code.

    Example: normalize("The  U.S.A.") == "usa"
    """
    without_articles = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_WITHOUT_PUNCTUATION))
    return " ".join(without_articles.split())


def best_f1(prediction: str, golds: Sequence[str]) -> float:
    """Largest F1 of the words of `prediction` against one of `golds`, all normalised; 0 without golds.

    F1 = 2 P R / (P + R), P and R the shares of predicted and of gold words that the other side has, with multiplicity.
    """
    return max((_f1(normalize(prediction), normalize(gold)) for gold in golds), default=0.0)


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and not _CLOSED_ANSWERS.isdisjoint((prediction, gold)):
        return 0.0
    predicted_words, gold_words = prediction.split(), gold.split()
    num_common = (Counter(predicted_words) & Counter(gold_words)).total()
    if num_common == 0:
        return 0.0
    precision = num_common / len(predicted_words)
    recall = num_common / len(gold_words)
    return (2 * precision * recall) / (precision + recall)
