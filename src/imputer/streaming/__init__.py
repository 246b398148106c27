"""Live recognition: samples in as they come, settled and partial text out."""

from imputer.streaming.live import Event, Stream

__all__ = ["Event", "Stream"]
