"""The one training step, and the engines that divide it among ranks.

`simulate` and `measure` run exactly this.
"""
