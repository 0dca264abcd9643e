"""Reserved."""

from .report import Interval


def reserved(recipe, peak):
    return Interval(peak, peak, peak)


def process(recipe, peak, card):
    return Interval(peak, peak, peak)
