"""Chapter 11's pictures: by what the ring shows, every card gets the sum of all."""

import pytest
from vramlab_course.figures.figures_11 import ring, ways

SAID = {1: "1 card", 2: "2 cards", 3: "3 cards", 4: "all 4"}


@pytest.mark.usefixtures("no_figure_stays")
def test_the_ring_gives_every_card_each_piece_of_all_cards():
    held = [{piece: {card} for piece in "ABCD"} for card in range(4)]
    for _, *sent in ring("A ring").rows[1:]:
        before = [dict(pieces) for pieces in held]
        for card, words in enumerate(sent):
            piece, said = words.split(": ")
            assert said == SAID[len(before[card][piece])]
            held[(card + 1) % 4][piece] = before[(card + 1) % 4][piece] | before[card][piece]
    assert all(len(cards) == 4 for pieces in held for cards in pieces.values())


@pytest.mark.usefixtures("no_figure_stays")
def test_each_way_has_its_name_and_rate():
    rates = {"NVLink": "50", "PCIe": "16", "copy": "3"}
    figure = ways(rates, "Three ways")
    said = [text.get_text() for text in figure.axes[0].texts]
    assert {"NVLink: 50", "PCIe: 16", "copy: 3", "RAM", "GPU 1"} <= set(said)
    assert figure.rows[1:] == list(rates.items()) and "copy: GB/s 3" in figure.alt
