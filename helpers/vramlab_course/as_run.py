"""What a published run did that the installed transformers does not do: `vramlab.simulation.as_run`."""

from vramlab.simulation.as_run import AS_RUN, as_it_ran, simulate_as_run

__all__ = ["AS_RUN", "as_it_ran", "simulate_as_run"]
