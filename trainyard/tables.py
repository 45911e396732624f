"""Tables and numbers in messages of the controller: the same formats as the trainer's."""

from trainer.formats import clock, mib, table, thousands

__all__ = ["clock", "mib", "table", "thousands"]
