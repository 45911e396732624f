"""The messages between the programs of a queued run. Standard library only."""

# Phases in `state.json` in which the driver of the run has not recorded its end.
LIVE = ("waiting", "running")
# Comments of a job of Slurm: it is submitted held, and released once `state.json` names it.
NEW, RELEASED = "trainyard-new", "trainyard-released"
# Reason of Slurm for a job that waits for one that did not complete.
UNSATISFIED = "DependencyNeverSatisfied"
