"""The messages between the programs of a queued run. Standard library only."""

PROGRAM = "program.zip"  # in the folder of a run: trainyard and trainer, which its driver runs
# Phases in `state.json` in which the driver of the run has not recorded its end.
LIVE = ("waiting", "running")
# Comments of a job of Slurm: it is submitted held, and released once `state.json` names it.
NEW, RELEASED = "trainyard-new", "trainyard-released"
