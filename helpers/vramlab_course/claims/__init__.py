"""What people say about training on a GPU, and whether it holds.

The claims are data, the verdicts are computed.
"""

from .verdicts import Claim, ClaimError, Finding, Ledger, Verdict, chapter_page, judge, load_claims

__all__ = [
    "Claim",
    "ClaimError",
    "Finding",
    "Ledger",
    "Verdict",
    "chapter_page",
    "judge",
    "load_claims",
]
