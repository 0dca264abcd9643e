"""What the tests of several chapters' claims ask of a verdict."""

import dataclasses

from vramlab.claims import NOT, Verdict


def depends_on_its_figure(verdict: Verdict) -> bool:
    """Whether another figure in the source would have got another verdict."""
    claim = verdict.claim
    other = not claim.quoted if claim.rule == "is" else claim.quoted * 2.3 + 1
    changed = Verdict(dataclasses.replace(claim, quoted=other), verdict.findings)
    return changed.outcome == NOT or changed.holding != verdict.holding
