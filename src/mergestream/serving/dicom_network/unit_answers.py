"""One answer for a series or a study, from the answers to its images."""

from collections.abc import Sequence

from mergestream.serving.dicom_network.results import ImageResult, UnitSummary
from mergestream.serving.dicom_network.rules import MEAN, WORST, Rule


def summary_of(images: Sequence[ImageResult], rule: Rule) -> UnitSummary:
    """The mean of the images' probabilities, or those of the image with the most of the rule's worst class.

    Images on which the service abstains do not count; if it abstains on all, the series or study has no prediction.
    """
    answers = [each.answer.of(each.row) for each in images]
    decided = [answer for answer in answers if answer.predictions[0] is not None]
    classes, rows = answers[0].classes, [answer.probabilities[0] for answer in decided or answers]
    if rule.how == WORST and rule.worst_class in classes:
        place = classes.index(rule.worst_class)
        probabilities = max(rows, key=lambda row: row[place])
        how = WORST
    else:
        probabilities = tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))
        how = MEAN
    best = max(range(len(classes)), key=probabilities.__getitem__)
    return UnitSummary(rule.answer, how, classes, probabilities, classes[best] if decided else None)
