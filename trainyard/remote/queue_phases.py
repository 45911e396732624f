"""The phases of a queued run, in `state.json` of its folder, in which its driver has not recorded its end."""

LIVE = ("waiting", "running")
