"""Figures that belong to one chapter each; `vramlab.plot` has those that readers reuse."""
