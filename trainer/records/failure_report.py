"""What a rank that failed leaves: the error in its heartbeat, and a line or a traceback in its log."""

import sys
import traceback

from trainer.common.errors import ScriptError, UserError
from trainer.records.telemetry import Heartbeat

# Errors of a rank whose peer failed first: these types, or a RuntimeError with one of these texts.
_PEER_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_ERROR_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "gloo",
)


def is_of_peer(error: BaseException) -> bool:
    """Return whether a rank that failed first caused an error."""
    return type(error).__name__ in _PEER_ERRORS or (
        isinstance(error, RuntimeError) and any(part in str(error) for part in _PEER_ERROR_TEXTS)
    )


def report_failure(heartbeat: Heartbeat, error: BaseException) -> int:
    """Write the error to the heartbeat and to stderr: one line for a UserError, a traceback otherwise. Return 1.

    A script has written its traceback itself. Call this while the error is being handled.
    """
    of_script, plain = isinstance(error, ScriptError), isinstance(error, UserError)
    text = error.log if isinstance(error, ScriptError) else traceback.format_exc()
    peer_failed = is_of_peer(error)
    heartbeat(
        "failed",
        force=True,
        error={
            "type": type(error).__name__,
            "message": str(error),
            "traceback": text,
            "plain": plain,
            "secondary": peer_failed and not plain,
        },
    )
    print(f"error: {error}" if plain or of_script else text, file=sys.stderr, flush=True)
    return 1
