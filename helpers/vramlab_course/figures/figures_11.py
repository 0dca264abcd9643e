"""Drawing of chapter 11: which piece of the gradients each card hands on in a ring."""

from .figures_09 import handed_on

# What a card sends in each round: its own piece, or the sum of several cards' pieces.
ROUNDS = {
    "round 1": ": 1 card",
    "round 2": ": 2 cards",
    "round 3": ": 3 cards",
    "round 4": ": all 4",
    "round 5": ": all 4",
    "round 6": ": all 4",
}


def ring(title: str):
    """Return a figure of an all-reduce of four cards: the piece that each sends, round by round."""
    about = "what each card sends to the next, and card 3 to card 0 · piece, and how many cards' "
    about += "gradients are added up in it"
    return handed_on(title, about, ["card 0", "card 1", "card 2", "card 3"], "ABCD", ROUNDS)
